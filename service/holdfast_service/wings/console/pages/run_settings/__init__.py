"""Pages for the maintenance of runs and checkpoints: rename, delete, restore, bulk actions."""

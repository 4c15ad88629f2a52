"""Pages on which runs and their checkpoints are cared for: rename, delete, bring back, mark many."""

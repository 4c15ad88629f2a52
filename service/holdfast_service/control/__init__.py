"""Plans, saves, commits, retention, and the catalog that records them. No tensor bytes here."""

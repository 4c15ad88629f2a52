"""Programs for a root that nobody serves."""

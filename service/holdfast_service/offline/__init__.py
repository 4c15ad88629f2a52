"""Programs for a root without a daemon."""

"""Large responses."""

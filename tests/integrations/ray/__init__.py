"""Ray Train with Holdfast's report."""

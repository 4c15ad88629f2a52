"""Checks of committed checkpoints: verification, test restores in other layouts, NaN and statistics."""

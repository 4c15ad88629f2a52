"""What a launch of a run restores, and may save."""

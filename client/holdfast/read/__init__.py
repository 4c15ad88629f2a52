"""A committed checkpoint, read and verified. No torch."""

"""Which checkpoints may be removed, and when."""

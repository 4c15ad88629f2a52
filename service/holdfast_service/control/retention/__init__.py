"""What may be removed, and when."""

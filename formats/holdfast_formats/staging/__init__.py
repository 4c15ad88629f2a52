"""The bytes between a rank and its daemon."""

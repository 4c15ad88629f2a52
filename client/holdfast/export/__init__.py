"""Copies and comparisons of whole checkpoints."""

"""Declared layouts: tensors as a rank holds them, and as they are stored."""

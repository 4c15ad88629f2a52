"""Restore a checkpoint into live state."""

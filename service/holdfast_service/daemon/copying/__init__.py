"""Copies of checkpoints: replicas, repair, import, export."""

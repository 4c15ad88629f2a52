"""Checkpoints on the disk: plan, publish, read, remove, and compare with the catalog."""

"""Checkpoints that other programs wrote: what is in them, read without running anything of theirs."""

"""Checkpoints that other programs wrote, read without running any of their code."""

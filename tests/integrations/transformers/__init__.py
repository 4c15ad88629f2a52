"""The adapter for transformers' Trainer, in the real one."""

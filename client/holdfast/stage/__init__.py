"""Copies live tensors into a slot of shared memory, while training goes on."""

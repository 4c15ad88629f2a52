"""This node's shared memory: segments, who holds what, and who may ask for it."""

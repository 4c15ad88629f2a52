"""This node's shared memory: segments, their owners, and access to it."""

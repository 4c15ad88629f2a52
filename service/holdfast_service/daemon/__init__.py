"""The data plane of one node: the arena, and what moves bytes between its slots and storage."""

"""Read and verify a committed checkpoint, without torch."""

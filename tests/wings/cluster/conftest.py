"""What these tests write is written to memory: they ask nothing of a disk."""

from tests.in_memory import tmp_path

__all__ = ["tmp_path"]

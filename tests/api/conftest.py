"""What these tests write is written to memory: they ask nothing of a disk."""

from tests.in_memory import tmp_path
from tests.serving import http

__all__ = ["http", "tmp_path"]

"""Directories in memory: for tests that write thousands of files, not one of which is to last, or to wait for a disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SHARED = Path("/dev/shm")
FREE_BYTES_MIN = 2**31  # a container gives 64 MiB unless it is asked for more: then the disk has to do


@contextmanager
def in_memory() -> Iterator[Path]:
    """A directory for the length of a block, in memory where there is room."""
    with tempfile.TemporaryDirectory(prefix="hf-", dir=memory()) as directory:
        yield Path(directory).resolve()


def memory() -> Path | None:
    """Where such directories are made; None is wherever temporary files go."""
    try:
        found = os.statvfs(SHARED)
    except OSError:
        return None
    return SHARED if found.f_bavail * found.f_frsize >= FREE_BYTES_MIN else None


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """The fixture of this name, in memory: for folders of tests that ask nothing of a disk."""
    with in_memory() as directory:
        yield directory

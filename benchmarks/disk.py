"""The disk as benchmarks need it: forced to be durable, made cold, made warm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

READ_BYTES = 16 * 2**20


def sync_tree(directory: Path) -> None:
    """Make everything below durable: what a peer that does not sync leaves to be done."""
    for parent, _, names in os.walk(directory):
        for path in (*(Path(parent) / name for name in names), Path(parent)):
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue  # another rank renamed it, and syncs it when it is done itself
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def drop_caches() -> bool:
    """Nothing stays in the page cache; False where only root could do that, and does not run this."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def warm(directory: Path) -> None:
    """Read every file once, so that it is in the page cache."""
    buffer = bytearray(READ_BYTES)
    for path in files(directory):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def files(directory: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(directory):
        for name in names:
            path = Path(parent) / name
            if path.is_file():
                yield path

"""Measures how fast the disk under a root writes: a short write into a file without a name, past the page
cache if possible.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast_files.direct import REFUSED

from . import libc
from .scratch import nameless
from .translation import translated

PIECE_BYTES = 4 * 2**20
WRITERS = 3  # as many as write a save
_DIRECT = getattr(os, "O_DIRECT", 0)


def measure(root: Path, size: int, stop: Callable[[], bool]) -> float | None:
    """Bytes a second of a write of `size`; None if `stop` says, between two pieces, that the disk is needed.

    Raises `StorageFailed` or `NoSpace`. Nothing is left on the disk.
    """
    with translated("measure", str(root)), mmap.mmap(-1, PIECE_BYTES) as piece:
        piece[:] = os.urandom(PIECE_BYTES)  # not zeros, which some disks do not write at all
        plain = nameless(root)
        try:
            libc.fallocate(plain, size)
            direct = _past_the_cache(plain)
            try:
                return _written(plain if direct is None else direct, piece, size, stop, waits=direct is None)
            finally:
                if direct is not None:
                    os.close(direct)
        finally:
            os.close(plain)


def _past_the_cache(descriptor: int) -> int | None:
    if not _DIRECT:
        return None
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno not in REFUSED and not isinstance(error, FileNotFoundError):
            raise
        return None


def _written(descriptor: int, piece: mmap.mmap, size: int, stop: Callable[[], bool], waits: bool) -> float | None:
    def write(offset: int) -> bool:
        if stop():
            return False
        os.pwrite(descriptor, piece, offset)
        if waits:  # the cache takes anything at any speed
            libc.start_writeback(descriptor, offset, PIECE_BYTES)
        return True

    began = time.monotonic()
    with ThreadPoolExecutor(WRITERS, "holdfast-disk") as pool:
        whole = all(list(pool.map(write, range(0, size, PIECE_BYTES))))
    if not whole:
        return None
    if waits:
        libc.await_writeback(descriptor, 0, size)
    return size / max(time.monotonic() - began, 1e-6)

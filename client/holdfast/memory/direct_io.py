"""Reads files past the page cache: an uncached load then costs less than half the processor time.

The disk writes into the reader's own memory. This pays only with memory of large pages: a transfer into small pages is split
into many, and takes longer than one through the page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from holdfast.memory.mapping import LARGE_BYTES

ALIGNMENT = max(4096, mmap.PAGESIZE)  # of offset, memory and length: as much as any disk requires
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of a file system without direct access
# Reads `size` bytes of a file from `start` on into memory from `memory_for`, and returns the bytes in it,
# fewer only if the file ends before; None if they are to be read through the page cache after all.
Reader = Callable[[str, int, int, memoryview], memoryview | None]
_DIRECT = getattr(os, "O_DIRECT", 0)  # not every system has it
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@lru_cache
def possible() -> bool:
    """Whether this system can read past the page cache, into large pages."""
    if not _DIRECT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        return "[never]" not in _LARGE_PAGES.read_text()
    except OSError:
        return False


def opened(path: Path) -> int | None:
    """A descriptor of a regular file that is read past the page cache; None if its file system does not support that."""
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | _DIRECT)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return None


def memory_for(size: int) -> memoryview:
    """Memory for any `size` bytes of a file and what alignment adds, of large pages as far as there are any."""
    room = -(-(size + 2 * ALIGNMENT) // LARGE_BYTES) * LARGE_BYTES
    taken = mmap.mmap(-1, room + LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        taken.madvise(mmap.MADV_HUGEPAGE)
    octets = np.frombuffer(taken, np.uint8)
    first = -octets.ctypes.data % LARGE_BYTES
    return octets[first : first + room].data


def read(descriptor: int, start: int, size: int, memory: memoryview) -> memoryview:
    """Read bytes of a file into `memory` and return the part of it that has them; fewer only if the file ends before.

    Raises `OSError`, one of `REFUSED` if this file cannot be read this way after all.
    """
    low = start - start % ALIGNMENT
    high = start + size + -(start + size) % ALIGNMENT
    done = 0
    while low + done < start + size:
        got = os.preadv(descriptor, (memory[done : high - low],), low + done)
        done += got
        if got == 0 or low + done >= os.fstat(descriptor).st_size:
            break
        if got % ALIGNMENT:
            raise OSError(errno.EINVAL, "read in part, from where reading cannot go on")
    return memory[start - low : max(min(done, start + size - low), start - low)]

"""Reading and writing past the page cache: which accesses are possible, and how to open such a descriptor."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence

from . import libc
from .tier import address

ALIGNMENT = max(4096, mmap.PAGESIZE)  # whole pages: no page is written both directly and through the cache
DIRECT_BYTES_MIN = 2**20  # a smaller file gains nothing from it
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of a file system without direct access
_DIRECT = getattr(os, "O_DIRECT", 0)  # not every system has it
_FLAGS = _DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_direct(leaf: str, access: int, directory: int) -> int | None:
    """A descriptor of a file that bypasses the page cache; None if the file system does not support that."""
    if not _DIRECT:
        return None
    try:
        return os.open(leaf, access | _FLAGS, dir_fd=directory)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return None


def is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Whether the page cache has at least half of [offset, offset + length) of a file; False where nobody can tell."""
    low = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = min(offset + length, os.fstat(descriptor).st_size) - low
    if length <= 0:
        return False
    try:  # mapping reads nothing, and neither does the question
        with mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=low) as mapped, memoryview(mapped) as view:
            return 2 * libc.resident_bytes(address(view), length) >= length
    except (OSError, ValueError):  # nothing can be mapped, there is no such call, or the file has just become shorter
        return False


def is_aligned(offset: int, views: Sequence[memoryview]) -> bool:
    """Whether the offset, and length and memory of every buffer, are aligned so that they can bypass the page cache."""
    numbers = [offset, *(view.nbytes for view in views), *(address(view) for view in views)]
    return any(view.nbytes for view in views) and all(number % ALIGNMENT == 0 for number in numbers)

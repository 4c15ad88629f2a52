"""Files past the page cache (`O_DIRECT`), and what the page cache has of them.

The disk writes into the reader's own memory: an uncached load then costs less than half the processor time. This pays only
with memory of large pages: a transfer into small pages is split into many, and takes longer than one through the page cache.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = max(4096, mmap.PAGESIZE)  # of offset, memory and length: whole pages, as much as any disk requires
LARGE_BYTES = 2 * 2**20  # a large page, on the machines we support
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of a file system without direct access
# Reads `size` bytes of a file from `start` on into memory from `memory_for`, and returns the bytes in it,
# fewer only if the file ends before; None if they are to be read through the page cache after all.
Reader = Callable[[str, int, int, memoryview], memoryview | None]
_DIRECT = getattr(os, "O_DIRECT", 0)  # not every system has it
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LOWEST_BIT = bytes(byte & 1 for byte in range(256))  # all that mincore defines
_libc = ctypes.CDLL(None, use_errno=True)


@lru_cache
def possible() -> bool:
    """Whether this system can read past the page cache, into large pages."""
    if not _DIRECT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    try:
        return "[never]" not in _LARGE_PAGES.read_text()
    except OSError:
        return False


def open_direct(path: Path | str, access: int = os.O_RDONLY, directory: int | None = None) -> int | None:
    """A descriptor of a file that bypasses the page cache; None if system or file system do not support that."""
    if not _DIRECT:
        return None
    try:
        return os.open(path, access | _DIRECT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
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
            raise OSError(errno.EINVAL, "the read stopped part way and cannot continue")
    return memory[start - low : max(min(done, start + size - low), start - low)]


def is_aligned(offset: int, views: Sequence[memoryview]) -> bool:
    """Whether the offset, and length and memory of every buffer, are aligned so that they can bypass the page cache."""
    held = [view for view in views if view.nbytes]
    numbers = [offset, *(view.nbytes for view in held), *(np.frombuffer(view, np.uint8).ctypes.data for view in held)]
    return bool(held) and all(number % ALIGNMENT == 0 for number in numbers)


class PageCacheState:
    """Tells which bytes of a file are in the page cache, by mapping it without touching it.

    A non-blocking read (`RWF_NOWAIT`) cannot answer this: newer kernels read ahead for it, and a fast disk has answered by
    the next look. `mincore` reads nothing, and answers the owner of a file and users who may write to it. For others it
    reports that everything is cached (`can_do_mincore` in Linux' mm/mincore.c), so they must try to read.
    """

    def __init__(self, descriptor: int) -> None:
        """The descriptor stays the caller's, and is needed as long as this object. Raises `OSError`."""
        self._descriptor = descriptor
        status = os.fstat(descriptor)
        self._size = status.st_size
        answered = status.st_uid == os.geteuid() or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)
        self._octets: Any = None
        if answered and self._size:
            self._octets = np.frombuffer(mmap.mmap(descriptor, self._size, prot=mmap.PROT_READ), np.uint8)

    def holds(self, offset: int, length: int = 1) -> bool:
        """Whether at least half of the pages with these bytes are cached; False if the file ends before. `OSError` if that
        cannot be found out.
        """
        length = min(length, self._size - offset)
        if length <= 0:
            return False
        if self._octets is None:
            return self._is_read_at_once(offset)
        low = offset - offset % mmap.PAGESIZE
        pages = (ctypes.c_ubyte * -(-(offset + length - low) // mmap.PAGESIZE))()
        at = self._octets.ctypes.data + low
        if _libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(offset + length - low), pages):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return 2 * bytes(pages).translate(_LOWEST_BIT).count(1) >= len(pages)

    def _is_read_at_once(self, offset: int) -> bool:
        if not hasattr(os, "RWF_NOWAIT"):
            raise OSError(errno.ENOSYS, "this system does not report what is in the page cache")
        try:
            return os.preadv(self._descriptor, (bytearray(1),), offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False

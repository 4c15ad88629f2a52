"""A file's page cache, mapped: what is in memory already is proven and handed over from there, without a copy between."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Between two probes for what is cached: a guess decides how bytes are read, never whether they are right.
PROBE_BYTES = 2**20
_POPULATE_READ = 22  # madvise: Linux 5.14, and no name in Python yet


class MappedFile:
    """The first `size` bytes of an open file, mapped for reading.

    A page that the disk cannot give ends a process that touches it in a mapping. So pages are brought in by a call that
    reports such an error instead, before anybody touches them; where there is no such call, nothing is viewed.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._memory: Any = mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else None
        self._octets: NDArray[np.uint8] = np.frombuffer(self._memory or b"", np.uint8)
        self._size = size

    def view(self, start: int, stop: int) -> memoryview | None:
        """Bytes [start, stop), all of them in memory; None when they are not cached, and reading them is the better way."""
        if not start < stop <= self._size or not self._is_cached(start, stop):
            return None
        first = start - start % mmap.PAGESIZE
        try:
            self._memory.madvise(_POPULATE_READ, first, stop - first)
        except (OSError, ValueError):
            return None
        return self._octets[start:stop].data

    def release(self, start: int, stop: int) -> None:
        """Unmap the pages that lie wholly in these bytes: nobody will view them again. They stay cached."""
        first, last = start + -start % mmap.PAGESIZE, stop - stop % mmap.PAGESIZE
        if first < last and self._memory is not None:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _is_cached(self, start: int, stop: int) -> bool:
        byte = bytearray(1)
        try:
            return all(
                os.preadv(self._descriptor, [byte], position, os.RWF_NOWAIT) == 1
                for position in (*range(start, stop, PROBE_BYTES), stop - 1)
            )
        except (OSError, AttributeError):  # it would have to wait, or cannot tell
            return False

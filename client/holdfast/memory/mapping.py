"""Maps shared memory so that the kernel can use large pages for it, and touches its pages."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Callable
from typing import Any

from holdfast_files.direct import LARGE_BYTES

log = logging.getLogger(__name__)

TOUCH_BYTES = 2 * 2**20  # at a time: a thread of the user that maps memory waits meanwhile
_REMOVE = 9  # madvise, as in mmap.MADV_REMOVE
_POPULATE_WRITE, _COLLAPSE = 23, 25  # Linux 5.14 and 6.1, without names in Python so far
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000


class Mapping:
    """A whole open memfd, mapped: `memory` shows it. It is unmapped when the last view of it is gone."""

    def __init__(self, fd: int, *, write: bool) -> None:
        """Raises `OSError` when it cannot be mapped."""
        size = os.fstat(fd).st_size
        # A large page needs an aligned address, which Python cannot ask for. So room is reserved first, and mapped over.
        room = mmap.mmap(-1, size + LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(room))
        skipped = -start % LARGE_BYTES
        self._address, self._size = start + skipped, size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
        if _libc().mmap(self._address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != self._address:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        shown = memoryview(room)[skipped : skipped + size]
        self.memory = shown if write else shown.toreadonly()

    def touch(self, begin: int, end: int, stopped: Callable[[], bool]) -> bool:
        """Touch every page of a range, with large pages as long as there are any; False if `stopped` before the end."""
        large, start = True, begin
        while start < end:
            until = min(start - start % TOUCH_BYTES + TOUCH_BYTES, end)
            large = large and self._put_large(start, until, stopped)
            if stopped():
                return False
            if not self._advise(start, until - start, _POPULATE_WRITE):
                log.info("shared memory cannot be faulted in ahead of time: %s", os.strerror(ctypes.get_errno()))
                break
            start = until
        return True

    def give_back(self, begin: int, end: int) -> None:
        """Return the memory of whole pages to the system, for all processes: they read zeros there until one writes."""
        if not self._advise(begin, end - begin, _REMOVE):
            log.info("shared memory cannot be given back: %s", os.strerror(ctypes.get_errno()))

    def _put_large(self, start: int, end: int, stopped: Callable[[], bool]) -> bool:
        """Make large pages of these bytes, until `stopped`; False if none are available."""
        for page in range(-(-start // LARGE_BYTES) * LARGE_BYTES, end - LARGE_BYTES + 1, LARGE_BYTES):
            if stopped():
                break
            if not self._advise(page, mmap.PAGESIZE, _POPULATE_WRITE) or not self._advise(page, LARGE_BYTES, _COLLAPSE):
                log.debug("no large pages for shared memory: %s", os.strerror(ctypes.get_errno()))
                return False
        return True

    def _advise(self, start: int, size: int, advice: int) -> bool:
        return bool(_libc().madvise(self._address + start, size, advice) == 0)


def _libc() -> Any:
    """The C library by ctypes, which releases the GIL; `mmap.madvise` does not."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library

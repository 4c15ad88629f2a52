"""Keeps buffered writes from flooding the page cache: written out as they come, and dropped when they are durable."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from contextlib import suppress

from . import libc

DIRTY_BYTES_MAX = 64 * 2**20
PACED_BYTES_MIN = 2**18  # smaller writes are left to fsync
_UNKNOWN = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP)

_start_writeback = libc.start_writeback
_await_writeback = libc.await_writeback


class Writeback:
    """Limits the dirty pages of one file. An error met while waiting is raised, because fsync would not repeat it (I9)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._known = True

    def wrote(self, descriptor: int, offset: int, length: int) -> None:
        """Begin to write these bytes out, and wait for the oldest ones if too many are under way."""
        if length < PACED_BYTES_MIN or not self._known:
            return
        try:
            _start_writeback(descriptor, offset, length)
            for late_offset, late_length in self._late(offset, length):
                _await_writeback(descriptor, late_offset, late_length)
        except OSError as error:
            if error.errno not in _UNKNOWN:
                raise
            self._known = False  # fsync will do all of it

    def _late(self, offset: int, length: int) -> list[tuple[int, int]]:
        late: list[tuple[int, int]] = []
        with self._lock:
            self._under_way.append((offset, length))
            self._bytes += length
            while self._bytes > DIRTY_BYTES_MAX:
                late.append(self._under_way.popleft())
                self._bytes -= late[-1][1]
        return late


def drop_from_cache(descriptor: int) -> None:
    """Let the kernel drop a file's clean pages: a checkpoint is rarely read right after it was written."""
    with suppress(OSError):  # only advice
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

"""Tells whether a file's bytes are in the page cache, without reading them.

A non-blocking read (`RWF_NOWAIT`) cannot answer this: newer kernels read ahead for it, and a fast disk has answered by the
next look. `mincore` reads nothing, and answers the owner of a file and those who may write to it. Everybody else is told
that all is cached (`can_do_mincore` in Linux' mm/mincore.c), and must try to read after all.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


class PageCacheState:
    """One file, which is mapped and never touched."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor stays the caller's, and is needed as long as this object. Raises `OSError`."""
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self._size = found.st_size
        told = found.st_uid == os.geteuid() or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)
        self._octets: Any = None
        if told and self._size:
            self._octets = np.frombuffer(mmap.mmap(descriptor, self._size, prot=mmap.PROT_READ), np.uint8)

    def holds(self, offset: int) -> bool:
        """Whether the page with this byte is cached; False if the file ends before. `OSError` if that
        cannot be found out.
        """
        if offset >= self._size:
            return False
        if self._octets is None:
            return self._answers(offset)
        page = ctypes.c_ubyte()
        at = self._octets.ctypes.data + offset - offset % mmap.PAGESIZE
        if _libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(1), ctypes.byref(page)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return bool(page.value & 1)

    def _answers(self, offset: int) -> bool:
        if not hasattr(os, "RWF_NOWAIT"):
            raise OSError(errno.ENOSYS, "this system does not report what is in the page cache")
        try:
            return os.preadv(self._descriptor, (bytearray(1),), offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False

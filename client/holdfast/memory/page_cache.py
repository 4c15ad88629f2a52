"""Whether a file's bytes are in the page cache, asked without reading them.

A read that may not wait (`RWF_NOWAIT`) is no such question: newer kernels read ahead for it, and a quick disk has answered
by the time it looks. `mincore` reads nothing, and tells those who own a file, or may write to it; everybody else it tells
that all is there (`can_do_mincore` in Linux' mm/mincore.c), and they have to ask by reading after all.
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
        """The descriptor stays the caller's, and is needed as long as this is. Raises `OSError`."""
        self._descriptor = descriptor
        found = os.fstat(descriptor)
        self._size = found.st_size
        told = found.st_uid == os.geteuid() or os.access(f"/proc/self/fd/{descriptor}", os.W_OK)
        self._octets: Any = None
        if told and self._size:
            self._octets = np.frombuffer(mmap.mmap(descriptor, self._size, prot=mmap.PROT_READ), np.uint8)

    def holds(self, offset: int) -> bool:
        """Whether the page with this byte is cached; False where the file ends before. `OSError` where nobody can tell."""
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

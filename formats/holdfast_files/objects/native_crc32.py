"""CRC-32 in C (`native_crc32.c`), if that was built and the processor has the instructions; otherwise zlib's."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path
from typing import Any

import numpy as np

LIBRARY = Path(__file__).with_name("_native_crc32.so")
BYTES_MIN = 2**10  # less costs more to hand over
_BLOCK = 16


def _load() -> Any:
    """The library, whose function runs without the GIL; None if it was not built, or not for this machine."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.holdfast_crc32.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
        library.holdfast_crc32.restype = ctypes.c_uint32
        return library if library.holdfast_crc32_here() else None
    except (OSError, AttributeError):
        return None


_library = _load()


def available() -> bool:
    return _library is not None


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """The checksum of bytes after others whose checksum is `before`, as `zlib.crc32`."""
    view = memoryview(data).cast("B")
    if _library is None or view.nbytes < BYTES_MIN:
        return zlib.crc32(view, before)
    whole = view.nbytes - view.nbytes % _BLOCK
    octets = np.frombuffer(view, np.uint8)
    found: int = _library.holdfast_crc32(before, octets.ctypes.data, whole)
    return zlib.crc32(view[whole:], found)

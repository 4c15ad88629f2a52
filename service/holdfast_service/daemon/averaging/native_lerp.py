"""The arithmetic of a fold in C (`native_lerp.c`), if that was built and the processor has fused operations."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

LIBRARY = Path(__file__).with_name("_native_lerp.so")


def _load() -> Any:
    """The library, whose functions run without the GIL; None if it was not built, or not for this machine."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.holdfast_lerp.argtypes = (*[ctypes.c_void_p] * 3, ctypes.c_size_t, ctypes.c_float)
        library.holdfast_lerp.restype = None
        return library if library.holdfast_lerp_here() else None
    except (OSError, AttributeError):
        return None


_library = _load()


def available() -> bool:
    return _library is not None


def lerp(
    kept: NDArray[np.float32], brought: NDArray[np.float32], into: NDArray[np.float32], weight: float | np.float32
) -> bool:
    """As `folding.Lerp`, into memory that overlaps neither input; False, without effect, if that is not possible."""
    arrays = kept, brought, into
    if _library is None or not all(one.flags.c_contiguous and one.dtype == np.float32 for one in arrays):
        return False
    if not len(kept) == len(brought) == len(into):
        raise ValueError(f"{len(kept)} and {len(brought)} elements do not make {len(into)}")
    _library.holdfast_lerp(kept.ctypes.data, brought.ctypes.data, into.ctypes.data, len(kept), float(weight))
    return True

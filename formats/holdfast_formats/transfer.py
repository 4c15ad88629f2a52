"""Save and restore as one function with opposite directions: bytes of a box <-> bytes of an extent.

An extent is a contiguous piece of a tensor, a box is a rectangle of it. `Direction.GATHER` fills the extent from boxes (the
writer), `Direction.SCATTER` fills boxes from the extent (every reader). No Python runs per row, and the GIL is released
while it copies. Matrices that have each other's rows as columns are copied in C (`native_transpose.c`), if that was built;
other arrays whose dimensions are in two orders, strip by strip.
"""

from __future__ import annotations

import ctypes
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.region import Box, Shape, flat_boxes, intersect

Elements = NDArray[Any]

LIBRARY = Path(__file__).with_name("_native_transpose.so")
ELEMENTS_MIN = 2**12  # fewer are in the caches anyway
STRIP = 16  # elements that are written in a row between other arrays: more of them miss the caches
_SIZES = (1, 2, 4, 8)


def _load() -> Any:
    """The library, whose function runs without the GIL; None if it was not built, or not for this machine."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        matrix = (ctypes.c_void_p, ctypes.c_size_t)
        library.holdfast_transpose.argtypes = (*matrix, *matrix, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
        library.holdfast_transpose.restype = None
    except (OSError, AttributeError):
        return None
    return library


_library = _load()


class Direction(Enum):
    GATHER = "boxes to extent"
    SCATTER = "extent to boxes"


def element_dtype(itemsize: int) -> np.dtype[Any]:
    return np.dtype(f"<u{itemsize}")


def move(direction: Direction, extent: Elements, start: int, held: Elements, box: Box, shape: Shape) -> int:
    """Copy the common elements of an extent and a box; returns their number.

    `extent` is 1-d: the elements of a row-major tensor of `shape` from flat position `start` on. `held` has the shape of
    `box`.
    """
    copied = 0
    position = 0
    for part in flat_boxes(start, start + extent.size, shape):
        common = intersect(part, box)
        if common is not None:
            piece = extent[position : position + part.volume].reshape(part.shape)
            inside, here = _view(piece, common.within(part)), _view(held, common.within(box))
            copy(*((inside, here) if direction is Direction.GATHER else (here, inside)))
            copied += common.volume
        position += part.volume
    return copied


def _view(array: Elements, box: Box) -> Elements:
    place: tuple[Any, ...] = (*box.slices, ...)  # without the ellipsis, a 0-d array would give its element
    view: Elements = array[place]
    return view


def copy(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy an array over another one of its shape and dtype, without overlap and without the GIL."""
    if source.size < ELEMENTS_MIN or target.shape != source.shape:
        np.copyto(target, source)
        return
    if _library is None or not _is_turned(target, source):
        _copy_strips(target, source)
        return
    if target.strides[0] < target.strides[1]:
        target, source = target.T, source.T
    rows, columns = target.shape
    steps = target.strides[0], source.strides[1]
    _library.holdfast_transpose(target.ctypes.data, steps[0], source.ctypes.data, steps[1], rows, columns, target.itemsize)


def _copy_strips(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Arrays of any dimensions: in two orders several times as fast as at once, where both have long rows."""
    written, read = _fastest(target), _fastest(source)
    if written == read or target.shape[read] < 4 * STRIP:
        np.copyto(target, source)
        return
    for start in range(0, target.shape[written], STRIP):
        strip = (slice(None),) * written + (slice(start, start + STRIP),)
        np.copyto(target[strip], source[strip])


def _fastest(array: NDArray[Any]) -> int:
    """The dimension whose elements are the closest in memory."""
    return min((d for d, n in enumerate(array.shape) if n > 1), key=lambda d: abs(array.strides[d]))


def _is_turned(target: NDArray[Any], source: NDArray[Any]) -> bool:
    """Whether the elements of each row follow each other in one of them, and those of each column in the other."""
    size = target.itemsize
    if source.ndim != 2 or target.shape != source.shape or target.dtype != source.dtype or size not in _SIZES:
        return False
    ours, theirs = target.strides, source.strides
    across = ours[1] == size == theirs[0] and min(ours[0], theirs[1]) > size
    down = ours[0] == size == theirs[1] and min(ours[1], theirs[0]) > size
    return target.flags.writeable and (across or down)

"""Save and restore as one function with opposite directions: bytes of a box <-> bytes of an extent.

An extent is a contiguous piece of a tensor, a box is a rectangle of it. `Direction.GATHER` fills the extent from boxes (the
writer), `Direction.SCATTER` fills boxes from the extent (every reader). numpy moves the rows, so no Python runs per row and
the GIL is released while it copies.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.region import Box, Shape, flat_boxes, intersect

Elements = NDArray[Any]


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
            slices, here = common.within(part).slices, common.within(box).slices
            if direction is Direction.GATHER:  # assigned by index: a 0-d array's element would be a copy
                piece[slices] = held[here]
            else:
                held[here] = piece[slices]
            copied += common.volume
        position += part.volume
    return copied

"""Where a local tensor's padding is: the ranges of its elements that no part covers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.layout.parts import LocalTensor, Part

Runs = tuple[NDArray[Any], int]  # first elements, and the length of each run


def gaps(local: LocalTensor) -> list[tuple[int, int]]:
    """Element ranges [start, stop) of the row-major local tensor, ascending, that are padding."""
    if not local.padding:
        return []
    runs = [_runs(part) for part in local.parts if part.box.volume]
    starts = np.concatenate([*(first for first, _ in runs), [local.volume]])
    stops = np.concatenate([[0], *(first + length for first, length in runs)])
    # Parts do not overlap, so the n-th start in order belongs to the gap after the n-th stop in order.
    starts.sort()
    stops.sort()
    open_ = np.flatnonzero(stops < starts)
    return [(int(stops[i]), int(starts[i])) for i in open_]


def _runs(part: Part) -> Runs:
    length, outer = 1, len(part.box.shape)
    while outer and (part.box.shape[outer - 1] == 1 or part.strides[outer - 1] == length):
        length *= part.box.shape[outer - 1]
        outer -= 1
    firsts = np.array([part.start], np.int64)
    for n, stride in zip(part.box.shape[:outer], part.strides[:outer], strict=True):
        firsts = np.add.outer(firsts, np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return firsts, length

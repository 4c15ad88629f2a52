"""L1 norms of task vectors before and after they are thinned out, and the factor that keeps the norm.

As mergekit's, the factor follows from sums in float64. PaddleFormers sums with numpy in F32, whose result depends on the
order: numpy halves a range again and again, and so does `PairwiseSum`, stretch by stretch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from holdfast_service.daemon.merging.scanning import Floats, total

_WHOLE_MAX = 2**17  # elements that are summed by one call of numpy; its own limit is 128, and halves are the same from there
_UNIT = 8  # numpy's ranges begin at multiples of this


class RunningSum(Protocol):
    """A sum over a whole tensor, whose stretches come in order."""

    def add(self, values: Floats) -> None: ...

    @property
    def value(self) -> np.float32: ...


class PlainSum:
    """The sum in float64, rounded once."""

    def __init__(self) -> None:
        self._sum = 0.0

    def add(self, values: Floats) -> None:
        self._sum += total(values)

    @property
    def value(self) -> np.float32:
        return np.float32(self._sum)


class PairwiseSum:
    """What `np.sum` of all elements as one contiguous F32 array is, bit by bit."""

    def __init__(self, elements: int) -> None:
        self._ranges = list(_ranges(elements))
        self._sums: list[np.float32] = []
        self._rest = np.empty(0, np.float32)

    def add(self, values: Floats) -> None:
        self._rest = np.concatenate([self._rest, values])
        while len(self._sums) < len(self._ranges) and self._rest.size >= self._ranges[len(self._sums)]:
            length = self._ranges[len(self._sums)]
            self._sums.append(np.float32(np.add.reduce(self._rest[:length])))
            self._rest = self._rest[length:]

    @property
    def value(self) -> np.float32:
        left = iter(self._sums)
        return _joined(sum(self._ranges), left)


def _halves(elements: int) -> tuple[int, int]:
    first = elements // 2
    first -= first % _UNIT
    return first, elements - first


def _ranges(elements: int) -> Iterator[int]:
    if elements <= _WHOLE_MAX:
        yield elements
        return
    for half in _halves(elements):
        yield from _ranges(half)


def _joined(elements: int, sums: Iterator[np.float32]) -> np.float32:
    if elements <= _WHOLE_MAX:
        return next(sums)
    first, second = _halves(elements)
    return np.float32(_joined(first, sums) + _joined(second, sums))

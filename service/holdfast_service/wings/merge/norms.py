"""L1 norms of task vectors before and after sparsification, and the factor that keeps the norm.

As mergekit's, the factor follows from sums in float64. PaddleFormers sums with numpy in F32, whose result depends on the
order: numpy halves a range again and again, and so does `PairwiseSum`, stretch by stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_service.wings.merge.scanning import Block, Floats, Mask, Scan, Workspace, total

_WHOLE_MAX = 2**17  # elements that are summed by one call of numpy; its own limit is 128, and halves are the same from there
_UNIT = 8  # numpy's ranges begin at multiples of this


_NORM_MIN = {"mergekit": 1e-7, "paddle": 1e-8}
_MASKS_BYTES_MAX = 2**26  # of the masks that are kept from the scan for the merge


class _Norm(NamedTuple):
    """A block's share of the norms of one task vector: sums, or for PaddleFormers all magnitudes."""

    before: Any
    after: Any
    mask: NDArray[np.uint8] | None


class ScaleFactors:
    """Factors that keep the L1 norm of task vectors, and their masks.

    `measure` blocks by any thread; a tensor's masks are kept for the merge if they are not too long, a bit an element.
    """

    def __init__(self, thinned: Sequence[bool], elements: int, dialect: Literal["mergekit", "paddle", "peft"]) -> None:
        self._thinned, self._elements, self._dialect = thinned, elements, dialect
        self._kept: list[NDArray[np.uint8] | None] = [None] * len(thinned)
        self._factors: list[np.float32 | None] = [None] * len(thinned)
        self._keeps = sum(thinned) * elements <= 8 * _MASKS_BYTES_MAX

    def measure(self, deltas: Sequence[Floats], masks: Sequence[Mask | None], space: Workspace) -> list[_Norm | None]:
        """A block's share, of the task vectors that have a mask."""
        norms: list[_Norm | None] = []
        for delta, mask in zip(deltas, masks, strict=True):
            if mask is None:
                norms.append(None)
                continue
            packed = np.packbits(mask) if self._keeps else None
            if self._dialect == "paddle":
                norms.append(_Norm(np.abs(delta), np.abs(delta) * mask, packed))
                continue
            magnitudes = np.abs(delta, out=space.floats("magnitudes", delta.size))
            before = total(magnitudes)
            norms.append(_Norm(before, total(np.multiply(magnitudes, mask, out=magnitudes)), packed))
        return norms

    def find(self, scan: Scan, measure: Callable[[Block], list[_Norm | None]]) -> None:
        keeps = self._keeps and (scan.length % 8 == 0 or scan.blocks == 1)
        size = -(-self._elements // 8)
        self._kept = [np.empty(size, np.uint8) if keeps and thinned else None for thinned in self._thinned]
        before, after = ([self._sum() for _ in self._thinned] for _ in range(2))
        for block, norms in enumerate(scan(measure)):
            for number, norm in enumerate(norms):
                if norm is None:
                    continue
                before[number].add(norm.before)
                after[number].add(norm.after)
                kept, at = self._kept[number], block * scan.length // 8
                if kept is not None and norm.mask is not None:
                    kept[at : at + norm.mask.size] = norm.mask
        least = _NORM_MIN[self._dialect]
        for number, thinned in enumerate(self._thinned):
            if thinned and min(before[number].value, after[number].value) >= least:
                self._factors[number] = np.float32(before[number].value / after[number].value)

    def factor(self, number: int) -> np.float32 | None:
        """A task vector's factor; None if it is unchanged."""
        return self._factors[number]

    def kept_mask(self, number: int, start: int, count: int) -> Mask | None:
        kept = self._kept[number]
        if kept is None:
            return None
        first = start // 8
        bits = np.unpackbits(kept[first : -(-(start + count) // 8)])
        mask: Mask = bits[start - 8 * first :][:count].view(np.bool_)
        return mask

    def _sum(self) -> PlainSum | PairwiseSum:
        return PairwiseSum(self._elements) if self._dialect == "paddle" else PlainSum()


class PlainSum:
    """The sum of blocks in float64, rounded once."""

    def __init__(self) -> None:
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._sum += value

    @property
    def value(self) -> np.float32:
        return np.float32(self._sum)


class PairwiseSum:
    """Bit for bit `np.sum` of all elements as one contiguous F32 array."""

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

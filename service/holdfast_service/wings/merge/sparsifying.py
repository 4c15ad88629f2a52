"""Which elements of a task vector stay, and how those are scaled: trimming, outliers, random drops, ranked drops.

trim        the largest magnitudes stay: so many of them, or those from a quantile on
outliers    the largest and the smallest go
random      each stays by a draw of its own
ranked      each stays by a draw of its own, with a chance that grows with its rank in its row
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_service.wings.merge.draws import Draws
from holdfast_service.wings.merge.scanning import Block, Floats, Mask, Workspace
from holdfast_service.wings.merge.selection import COLLECTED_MAX, Bits, Selector, magnitude_bits

Sparsification = Literal["none", "trim", "outliers", "random", "ranked"]
Trim = Literal["count", "quantile"]

_RANKED_AT_ONCE = 2**17
_PLACE_BITS = 31  # with the 31 of a magnitude, a key is an ordinary float64


class Sparsity(NamedTuple):
    """How one model's task vector is sparsified: the way, the `density`, and further parameters."""

    how: Sparsification
    density: float
    gamma: float = 0.0
    epsilon: float = 0.0
    trim: Trim = "count"


class Rows(NamedTuple):
    """The rows that are ranked: of `length` elements at a distance of `step`, `step` rows side by side."""

    length: int
    step: int

    @property
    def elements(self) -> int:
        """Elements of rows that lie side by side."""
        return self.length * self.step


def rows_of(shape: tuple[int, ...]) -> Rows:
    """Along the second dimension, as mergekit sorts; a vector is one row."""
    if len(shape) < 2:
        return Rows(max(prod(shape), 1), 1)
    return Rows(max(shape[1], 1), max(prod(shape[2:]), 1))


class ThinnedVector:
    """Finds which elements of one task vector stay.

    Until it is `ready`: `measure` a scan's blocks, by any thread, `add` the results in order, and `end_scan`.
    """

    def __init__(
        self, sparsity: Sparsity, elements: int, rows: Rows, draws: Draws, collected_max: int = COLLECTED_MAX
    ) -> None:
        self._sparsity, self._elements, self._rows, self._draws = sparsity, elements, rows, draws
        self._collected_max = collected_max
        self.all = sparsity.how == "none" or sparsity.density >= 1 or not elements
        self.selectors: list[Selector] = []
        self._share = np.float32(0)
        if not self.all and sparsity.how == "trim":
            self._begin_trim()
        elif not self.all and sparsity.how == "outliers":
            self._begin_outliers()
        elif not self.all and sparsity.how == "ranked":
            density, epsilon = sparsity.density, sparsity.epsilon
            places = np.arange(rows.length, dtype=np.float32) / np.float32(max(rows.length - 1, 1))
            self._chances = np.float32(density - epsilon) + places * np.float32(2) * np.float32(epsilon)

    def _selector(self, count: int, largest: bool) -> Selector:
        return Selector(count, largest, self._elements, self._collected_max)

    def _begin_trim(self) -> None:
        density = self._sparsity.density
        if self._sparsity.trim == "count":
            self.selectors = [self._selector(max(int(density * self._elements), 1), largest=True)]
            return
        # numpy's quantile of F32 values: between the two elements around this place in their order
        place = np.float32(self._elements - 1) * np.float32(1 - density)
        below = min(int(np.floor(place)), self._elements - 1)
        self._share = np.float32(place - np.float32(below))
        ranks = (below + 1, min(below + 2, self._elements))
        self.selectors = [self._selector(rank, largest=False) for rank in ranks]

    def _begin_outliers(self) -> None:
        wanted = int(self._sparsity.density * self._elements)
        top = int(self._sparsity.gamma * self._elements)
        self._bottom = max(self._elements - wanted - top, 0)
        self._nothing = wanted == 0
        ranks = () if self._nothing else (self._bottom, self._bottom + wanted)
        self.selectors = [self._selector(rank, largest=False) for rank in ranks if rank]

    @property
    def waiting(self) -> list[Selector]:
        """The selectors that need another scan."""
        return [one for one in self.selectors if not one.ready]

    def mask(self, start: int, delta: Floats, space: Workspace) -> Mask:
        how = self._sparsity.how
        if how == "random":
            return self._draws.below(self._sparsity.density, start, delta.size)
        if how == "ranked":
            made: Mask = self._draws.uniform(start, delta.size) < self.chances(delta, space)
            return made
        if how == "trim" and self._sparsity.trim == "quantile":
            low, high = (one.cut for one in self.selectors)
            assert low is not None and high is not None
            return ~(np.abs(delta) < between(low.magnitude, high.magnitude, self._share))
        return self._cut(start, magnitude_bits(delta, space.array("bits", delta.size, np.uint32)))

    def _cut(self, start: int, bits: Bits) -> Mask:
        if self._sparsity.how == "outliers" and self._nothing:
            return np.zeros(bits.size, np.bool_)
        first, last = self.selectors[0].cut, self.selectors[-1].cut
        assert first is not None and last is not None
        if self._sparsity.how == "trim":
            return last.largest(bits, start)
        mask = last.smallest(bits, start)
        if self._bottom:
            mask &= ~first.smallest(bits, start)
        return mask

    def chances(self, delta: Floats, space: Workspace) -> Floats | np.float32:
        """The chance of each element of a stretch to stay, if ranks decide, in the workspace; else the density."""
        if self._sparsity.how != "ranked":
            return np.float32(self._sparsity.density)
        bits = magnitude_bits(delta, space.array("bits", delta.size, np.uint32))
        floats = space.floats("chances", delta.size)
        rows, (length, step) = bits.reshape(-1, *self._rows).swapaxes(1, 2), self._rows
        whole, beside = max(_RANKED_AT_ONCE // self._rows.elements, 1), max(_RANKED_AT_ONCE // length, 1)
        for at in range(0, rows.shape[0], whole):
            for side in range(0, step, beside):
                part = rows[at : at + whole, side : side + beside]
                firsts = np.arange(at, at + part.shape[0])[:, None] * self._rows.elements + side + np.arange(part.shape[1])
                floats[_order(part) * step + firsts[:, :, None]] = self._chances
        return floats


def _order(rows: Bits) -> NDArray[np.int64]:
    """Sorted positions of each row; of equal elements the earlier comes first."""
    keys = rows.astype(np.uint64)
    keys <<= np.uint64(_PLACE_BITS)
    keys |= np.arange(rows.shape[-1], dtype=np.uint64)
    ordered = keys.view(np.float64)  # positive numbers: they have the same order, and are sorted faster
    ordered.sort(axis=-1)
    keys &= np.uint64(2**_PLACE_BITS - 1)
    return keys.view(np.int64)


def measured(vectors: Sequence[ThinnedVector], deltas: Sequence[Floats], block: Block) -> list[Any]:
    """Measurements of this block for all vectors' waiting selectors."""
    results = []
    for vector, delta in zip(vectors, deltas, strict=True):
        waiting = [one for one in vector.waiting if one.wanted in (None, block.number)]
        if waiting:
            bits = magnitude_bits(delta, block.space.array("bits", block.size, np.uint32))
            results += [one.measure(bits) for one in waiting]
    return results


def between(low: np.float32, high: np.float32, share: np.float32) -> np.float32:
    """Linear interpolation, rounded as in numpy's quantile."""
    step = np.float32(high - low)
    if share >= 0.5:
        return np.float32(high - step * (np.float32(1) - share))
    return np.float32(low + step * share)

"""Which elements of a task vector stay, and how those are scaled: trimming, outliers, random drops, ranked drops.

trim        the largest magnitudes stay: so many of them, or those from a quantile on
outliers    the largest and the smallest go
random      each stays by a draw of its own
ranked      each stays by a draw of its own, with a chance that grows with its rank in its row
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_service.daemon.merging.draws import Draws
from holdfast_service.daemon.merging.scanning import Floats, Mask
from holdfast_service.daemon.merging.selection import Selector, magnitude_bits

Sparsification = Literal["none", "trim", "outliers", "random", "ranked"]
Trim = Literal["count", "quantile"]


class Sparsity(NamedTuple):
    """How one model's task vector is thinned out: how, to which `density`, and what the way needs besides."""

    how: Sparsification
    density: float
    gamma: float = 0.0
    epsilon: float = 0.0
    trim: Trim = "count"


class ThinnedVector:
    """Finds which elements of one task vector stay. `feed` it whole scans until it is `ready`."""

    def __init__(self, sparsity: Sparsity, elements: int, row: int, draws: Draws) -> None:
        self._sparsity, self._elements, self._row, self._draws = sparsity, elements, row, draws
        self.all = sparsity.how == "none" or sparsity.density >= 1 or not elements
        self._selectors: list[Selector] = []
        self._share = np.float32(0)
        if not self.all and sparsity.how == "trim":
            self._begin_trim()
        elif not self.all and sparsity.how == "outliers":
            self._begin_outliers()

    def _begin_trim(self) -> None:
        density = self._sparsity.density
        if self._sparsity.trim == "count":
            self._selectors = [Selector(max(int(density * self._elements), 1), largest=True)]
            return
        # numpy's quantile of F32 values: between the two elements around this place in their order
        place = np.float32(self._elements - 1) * np.float32(1 - density)
        below = min(int(np.floor(place)), self._elements - 1)
        self._share = np.float32(place - np.float32(below))
        ranks = (below + 1, min(below + 2, self._elements))
        self._selectors = [Selector(rank, largest=False) for rank in ranks]

    def _begin_outliers(self) -> None:
        wanted = int(self._sparsity.density * self._elements)
        top = int(self._sparsity.gamma * self._elements)
        self._bottom = max(self._elements - wanted - top, 0)
        self._nothing = wanted == 0
        ranks = () if self._nothing else (self._bottom, self._bottom + wanted)
        self._selectors = [Selector(rank, largest=False) for rank in ranks if rank]

    @property
    def ready(self) -> bool:
        return all(one.ready for one in self._selectors)

    def feed(self, start: int, delta: Floats) -> None:
        """A stretch of the scan, in order."""
        found = magnitude_bits(delta)
        for one in self._selectors:
            one.feed(start, found)

    def end_scan(self) -> None:
        """All stretches were fed."""
        for one in self._selectors:
            one.end_scan()

    def mask(self, start: int, delta: Floats) -> Mask:
        """Which elements of a stretch stay."""
        how = self._sparsity.how
        if how == "trim":
            return self._trimmed(start, delta)
        if how == "outliers":
            return self._between(start, delta)
        made: Mask = self._draws.uniform(start, delta.size) < self.chances(delta)
        return made

    def chances(self, delta: Floats) -> NDArray[np.float32] | float:
        """The chance of each element of a stretch to stay, where draws decide; else the density."""
        if self._sparsity.how != "ranked":
            return self._sparsity.density
        rows = np.abs(delta).reshape(-1, self._row)
        order = np.argsort(rows, axis=1, kind="stable")
        ranks = np.empty(order.shape, np.float32)
        np.put_along_axis(ranks, order, np.arange(self._row, dtype=np.float32)[None, :], axis=1)
        ranks /= np.float32(max(self._row - 1, 1))
        density, epsilon = self._sparsity.density, self._sparsity.epsilon
        made: NDArray[np.float32] = np.float32(density - epsilon) + ranks * np.float32(2) * np.float32(epsilon)
        return made.reshape(-1)

    def _trimmed(self, start: int, delta: Floats) -> Mask:
        cuts = [one.cut for one in self._selectors]
        if self._sparsity.trim == "count":
            assert cuts[0] is not None
            return cuts[0].largest(magnitude_bits(delta), start)
        assert cuts[0] is not None and cuts[1] is not None
        made: Mask = ~(np.abs(delta) < between(cuts[0].magnitude, cuts[1].magnitude, self._share))
        return made

    def _between(self, start: int, delta: Floats) -> Mask:
        if self._nothing:
            return np.zeros(delta.size, np.bool_)
        cuts = [one.cut for one in self._selectors]
        found = magnitude_bits(delta)
        last = cuts[-1]
        assert last is not None
        made = last.smallest(found, start)
        if self._bottom and cuts[0] is not None:
            made &= ~cuts[0].smallest(found, start)
        return made


def between(low: np.float32, high: np.float32, share: np.float32) -> np.float32:
    """The point at this share of the way from one number to another, as numpy's quantile rounds it."""
    step = np.float32(high - low)
    if share >= 0.5:
        return np.float32(high - step * (np.float32(1) - share))
    return np.float32(low + step * share)

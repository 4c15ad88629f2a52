"""Exact ranks by magnitude in a tensor that is never held as a whole: two histograms of the bits of its F32 values.

Without the sign, bits of floating-point numbers are ordered as their magnitudes. The first scan counts their upper half, the
second the lower half within the one bin that has the rank, a third finds which of equal elements are still inside. Of
equal elements the one with the lower index comes first. NaN counts as larger than any number.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_service.daemon.merging.scanning import Floats, Mask

_LOW_BITS = 15
_HIGH_BINS, _LOW_BINS = 2**16, 2**_LOW_BITS
_SIGN = np.uint32(0x7FFFFFFF)

Bits = NDArray[np.uint32]


def magnitude_bits(values: Floats) -> Bits:
    """The bits of the magnitudes, ordered as they are."""
    made: Bits = values.view(np.uint32) & _SIGN
    return made


class RankCut(NamedTuple):
    """The first elements of an order by magnitude: those beyond `bits`, and of those with just these bits the ones
    whose index is before `before`.
    """

    bits: int
    before: int

    def largest(self, found: Bits, start: int) -> Mask:
        """Which elements of a stretch are inside, where the order begins at the largest."""
        made: Mask = (found > self.bits) | self._equal(found, start)
        return made

    def smallest(self, found: Bits, start: int) -> Mask:
        """The same where it begins at the smallest."""
        made: Mask = (found < self.bits) | self._equal(found, start)
        return made

    def _equal(self, found: Bits, start: int) -> Mask:
        made: Mask = found == self.bits
        if self.before < start + found.size:
            made[max(self.before - start, 0) :] = False
        return made

    @property
    def magnitude(self) -> np.float32:
        """That of the last element inside."""
        return np.uint32(self.bits).view(np.float32)


class Selector:
    """Finds the first `count` elements in the order by magnitude. Feed it whole scans until it is `ready`."""

    def __init__(self, count: int, largest: bool) -> None:
        """`count` is from 1 to the tensor's elements."""
        self._left, self._largest = count, largest
        self._scan = 0
        self._bins = np.zeros(_HIGH_BINS, np.int64)
        self._high = self._bits = 0
        self.cut: RankCut | None = None

    @property
    def ready(self) -> bool:
        return self.cut is not None

    def feed(self, start: int, found: Bits) -> None:
        """A stretch of the scan, in order."""
        if self.ready:
            return
        if self._scan == 0:
            self._bins += np.bincount(found >> _LOW_BITS, minlength=_HIGH_BINS)
        elif self._scan == 1:
            inside = found[found >> _LOW_BITS == self._high]
            self._bins += np.bincount(inside & (_LOW_BINS - 1), minlength=_LOW_BINS)
        else:
            equal = np.flatnonzero(found == self._bits)
            if equal.size >= self._left:
                self.cut = RankCut(self._bits, start + int(equal[self._left - 1]) + 1)
            self._left -= equal.size

    def end_scan(self) -> None:
        """All stretches were fed."""
        if self.ready:
            return
        self._scan += 1
        chosen = self._bin_of_the_last()
        if self._scan == 1:
            self._high, self._bins = chosen, np.zeros(_LOW_BINS, np.int64)
        elif self._scan == 2:
            self._bits = self._high << _LOW_BITS | chosen
            if self._left == self._bins[chosen]:
                self.cut = RankCut(self._bits, np.iinfo(np.int64).max)

    def _bin_of_the_last(self) -> int:
        """The bin with the last of the first `_left` elements; what is in the bins before it is counted off."""
        bins = self._bins[::-1] if self._largest else self._bins
        reached = np.cumsum(bins)
        at = int(np.searchsorted(reached, self._left))
        self._left -= int(reached[at] - bins[at])
        return bins.size - 1 - at if self._largest else at

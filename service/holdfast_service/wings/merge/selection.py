"""Exact ranks by magnitude in a tensor that is never held as a whole, mostly by one scan.

Without the sign, bits of floating-point numbers are ordered as their magnitudes. A sample estimates the element of a rank;
one scan counts elements below that window and collects those inside. If the estimate was wrong, three scans find the element
exactly: the first counts the upper half of the bits, the second the lower half within the one bin that has the rank, the
third counts equal elements. Of these the one with the lower index comes first, so the last one inside is looked up in its
block. NaN counts as larger than any number.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_service.wings.merge.scanning import BLOCK_ELEMENTS, Floats, Mask

_LOW_BITS = 15
_HIGH_BINS, _LOW_BINS = 2**16, 2**_LOW_BITS
_ALL = 0x7FFFFFFF  # the bits of magnitudes
_SIGN = np.uint32(_ALL)
COLLECTED_MAX = 2**20  # different elements in a window, block by block, that one selector keeps: 12 bytes each
_DEVIATIONS, _UNLIKE = 5, 0.005  # a sample's window: standard deviations on each side, and what parts of a tensor differ by
_LUMP = 0.002  # of a sample: where 16-bit numbers were subtracted, many elements are equal

Bits = NDArray[np.uint32]
_Way = Literal["window", "high", "low", "equal", "place"]


def magnitude_bits(values: Floats, into: Bits | None = None) -> Bits:
    """The bits of the magnitudes, ordered as they are."""
    bits: Bits = np.bitwise_and(values.view(np.uint32), _SIGN, out=into)
    return bits


class RankCut(NamedTuple):
    """The first elements of an order by magnitude: those beyond `bits`, and those equal to it with an index before
    `before`.
    """

    bits: int
    before: int

    def largest(self, bits: Bits, start: int) -> Mask:
        """The elements of a stretch that are inside, in descending order."""
        if self.before <= start:
            return bits > self.bits
        mask: Mask = bits >= self.bits
        self._cut_equal(mask, bits, start)
        return mask

    def smallest(self, bits: Bits, start: int) -> Mask:
        """The elements of a stretch that are inside, in ascending order."""
        if self.before <= start:
            return bits < self.bits
        mask: Mask = bits <= self.bits
        self._cut_equal(mask, bits, start)
        return mask

    def _cut_equal(self, mask: Mask, bits: Bits, start: int) -> None:
        at = self.before - start
        if at < bits.size:
            mask[at:] &= bits[at:] != self.bits

    @property
    def magnitude(self) -> np.float32:
        return np.uint32(self.bits).view(np.float32)


class Selector:
    """Finds the first `count` elements in the order by magnitude, by as many scans as needed.

    Each scan: `measure` every block, or the one that `wanted` names, in any order and by any thread; `add` the results, in
    the order of the blocks; then `end_scan`, until it is `ready`.
    """

    def __init__(self, count: int, largest: bool, elements: int, collected_max: int = COLLECTED_MAX) -> None:
        """`count` is from 1 to `elements`, those of the tensor. `collected_max` limits memory, and does not affect
        results.
        """
        self._count, self._largest, self._elements, self._collected_max = count, largest, elements, collected_max
        self._left = count
        self._way: _Way = "window" if elements <= collected_max else "high"
        self._low, self._high = 0, _ALL
        self._ends: tuple[int, ...] = ()  # ends of the window that many elements are equal to
        self._below = self._inside = self._different = 0
        self._collected: list[Any] = []  # of each block: how many, or the different ones and how many of each
        self._bins, self._lock = np.zeros(_HIGH_BINS, np.int64), Lock()
        self._bin = self._bits = 0
        self.wanted: int | None = None
        self.cut: RankCut | None = None

    @property
    def ready(self) -> bool:
        return self.cut is not None

    def predict(self, sample: Bits) -> None:
        """Estimate the window from some sorted magnitudes of the tensor. They do not affect results."""
        if self._elements <= self._collected_max or not sample.size:
            return
        share = (self._count if not self._largest else self._elements - self._count) / self._elements
        margin = _DEVIATIONS * sqrt(sample.size * share * (1 - share)) + _UNLIKE * sample.size + 1
        low, high = int(share * sample.size - margin), int(share * sample.size + margin) + 1
        different = np.unique(sample[max(low, 0) : high + 1]).size  # few, where 16-bit numbers were subtracted
        inside = min((high - low) / sample.size * self._elements, different * self._elements / BLOCK_ELEMENTS)
        if inside > self._collected_max:
            return
        self._low = int(sample[low]) if low >= 0 else 0
        self._high = int(sample[high]) if high < sample.size else _ALL
        self._way = "window"
        ends = np.array([self._low, self._high], np.uint32)
        equal = np.searchsorted(sample, ends, "right") - np.searchsorted(sample, ends, "left")
        self._ends = tuple(ends[equal > _LUMP * sample.size].tolist())

    def measure(self, bits: Bits) -> Any:
        if self._way == "window":
            below = int(np.count_nonzero(bits < self._low)) if self._low else 0
            if self._low == self._high:
                return below, int(np.count_nonzero(bits == self._low))
            return below, self._different_ones(bits)
        if self._way == "high":
            return self._count_bins(np.bincount(bits >> _LOW_BITS, minlength=_HIGH_BINS))
        if self._way == "low":
            inside = bits[bits >> _LOW_BITS == self._bin]
            return self._count_bins(np.bincount(inside & (_LOW_BINS - 1), minlength=_LOW_BINS))
        if self._way == "equal":
            return int(np.count_nonzero(bits == self._bits))
        return int(np.flatnonzero(bits == self._bits)[self._left - 1])

    def _different_ones(self, bits: Bits) -> tuple[Bits, NDArray[np.int64]]:
        """The different elements in the window, and how many of each; large ends are counted without being collected."""
        first, last = self._low + (self._low in self._ends), self._high - (self._high in self._ends)
        inside = bits[(bits - np.uint32(first)) <= last - first] if first <= last else bits[:0]
        values, counts = np.unique(inside, return_counts=True)
        for end in self._ends:
            count = int(np.count_nonzero(bits == end))
            if count:
                at = 0 if end == self._low else values.size
                values, counts = np.insert(values, at, end), np.insert(counts, at, count)
        return values, counts

    def add(self, start: int, measured: Any) -> None:
        """Add `measure`'s result for the block that begins at element `start`."""
        if self._way == "window":
            below, inside = measured
            self._below += below
            self._inside += inside if isinstance(inside, int) else int(inside[1].sum())
            self._different += 0 if isinstance(inside, int) else inside[0].size
            if self._different > self._collected_max:
                self._collected.clear()
            else:
                self._collected.append(inside)
        elif self._way == "equal":
            self._collected.append(measured)
        elif self._way == "place":
            self.cut = RankCut(self._bits, start + measured + 1)

    def _count_bins(self, counts: NDArray[np.int64]) -> None:
        """Integers: the order in which blocks are counted does not matter."""
        with self._lock:
            self._bins += counts

    def end_scan(self) -> None:
        if self.ready:
            return
        if self._way == "window":
            self._end_window()
        elif self._way == "high":
            self._bin, self._bins, self._way = self._bin_of_the_last(), np.zeros(_LOW_BINS, np.int64), "low"
        elif self._way == "low":
            chosen = self._bin_of_the_last()
            self._bits = self._bin << _LOW_BITS | chosen
            self._way, self._collected = "equal", []
            self._end_if_all(int(self._bins[chosen]))
        elif self._way == "equal":
            self._look_up(self._collected)

    def _end_window(self) -> None:
        """Find the element, if the window has its rank; else start the exact scans."""
        rank = self._elements - self._count + 1 if self._largest else self._count
        inside, lump = self._collected, self._low == self._high
        if not self._below < rank <= self._below + self._inside or self._different > self._collected_max:
            self._way, self._collected = "high", []
            return
        if lump:
            self._bits, less, equal = self._low, self._below, list(inside)
        else:
            self._bits, less = _nth(inside, self._inside, rank - self._below)
            less += self._below
            equal = [_count_of(self._bits, *one) for one in inside]
        more = self._elements - less - sum(equal)
        self._left = self._count - (more if self._largest else less)
        if not self._end_if_all(sum(equal)):
            self._look_up(equal)

    def _end_if_all(self, equal: int) -> bool:
        if self._left == equal:
            self.cut = RankCut(self._bits, np.iinfo(np.int64).max)
        return self.ready

    def _look_up(self, equal: list[int]) -> None:
        """Find the last of the first `_left` equal elements, in the block that has it."""
        reached = np.cumsum(equal)
        self.wanted = int(np.searchsorted(reached, self._left))
        self._left -= int(reached[self.wanted]) - equal[self.wanted]
        self._way, self._collected = "place", []

    def _bin_of_the_last(self) -> int:
        """The bin with the last of the first `_left` elements; subtracts the bins before it."""
        bins = self._bins[::-1] if self._largest else self._bins
        reached = np.cumsum(bins)
        at = int(np.searchsorted(reached, self._left))
        self._left -= int(reached[at] - bins[at])
        return bins.size - 1 - at if self._largest else at


def _nth(inside: Sequence[tuple[Bits, NDArray[np.int64]]], total: int, nth: int) -> tuple[int, int]:
    """The collected element with this rank, from 1 on; and how many are smaller."""
    values = np.concatenate([values for values, _ in inside])
    if values.size == total:  # all are different within their block
        nth_value = int(np.partition(values, nth - 1)[nth - 1])
        return nth_value, int(np.count_nonzero(values < nth_value))
    order = np.argsort(values)
    reached = np.cumsum(np.concatenate([counts for _, counts in inside])[order])
    ordered = values[order]
    nth_value = int(ordered[np.searchsorted(reached, nth)])
    first = int(np.searchsorted(ordered, nth_value))
    return nth_value, int(reached[first - 1]) if first else 0


def _count_of(bits: int, values: Bits, counts: NDArray[np.int64]) -> int:
    at = int(np.searchsorted(values, bits))
    return int(counts[at]) if at < values.size and values[at] == bits else 0

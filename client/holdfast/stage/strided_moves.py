"""Moves of memory that is not contiguous, such as a weight that is stored transposed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.memory import native_copy
from holdfast_formats import transfer

Array = NDArray[Any]
Pair = tuple[Array, Array]  # target and source, of one shape and integer dtype


class StridedMoves:
    """Pairs of a target and a source, of which one element of every stretch of the source is noted: together, because a call
    of numpy for each would take longer than to read them. Used by one save at a time.
    """

    def __init__(self, pairs: Sequence[Pair], stretch: int) -> None:
        """`stretch` is in bytes, without those between elements: a multiple of eight."""
        self._pairs = pairs
        sizes = np.array([source.size for _, source in pairs], np.int64)
        stretches = stretch // np.array([source.itemsize for _, source in pairs], np.int64)
        counts = -(-sizes // stretches)
        self._ends: list[int] = [0, *accumulate(counts.tolist())]
        of = np.repeat(np.arange(len(pairs)), counts)
        self._begins = (np.arange(len(of)) - np.array(self._ends[:-1], np.int64)[of]) * stretches[of]
        self._lengths = np.minimum(sizes[of] - self._begins, stretches[of]).astype(np.uint64)
        self._bases = np.array([source.ctypes.data for _, source in pairs], np.int64)[of]
        self._axes = [(lengths[of], steps[of]) for lengths, steps in _axes([source for _, source in pairs])]
        self._places = np.zeros((len(of), 2), np.uint64)  # address and bytes
        self._places[:, 1] = np.array([source.itemsize for _, source in pairs], np.uint64)[of]
        self._noted = np.zeros(len(of), np.uint64)

    def note(self, seed: int) -> None:
        """Record present elements of the sources, at places that are drawn from the seed."""
        drawn = native_copy.mix(np.arange(len(self._begins), dtype=np.uint64) + np.uint64(seed)) >> np.uint64(32)
        rest = self._begins + (drawn * self._lengths >> np.uint64(32)).astype(np.int64)
        addresses = self._bases.copy()
        for lengths, steps in self._axes:
            rest, at = np.divmod(rest, lengths)
            addresses += at * steps
        self._places[:, 0] = addresses
        self._noted = self._read(0, len(self._pairs))

    def copy(self, number: int) -> bool:
        """Copy a source; return whether it differs from what was noted of it, read again after the copy."""
        transfer.copy(*self._pairs[number])
        noted = self._noted[self._ends[number] : self._ends[number + 1]]
        return not np.array_equal(noted, self._read(number, number + 1))

    def _read(self, first: int, stop: int) -> NDArray[np.uint64]:
        places = self._places[self._ends[first] : self._ends[stop]]
        if native_copy.available():
            return native_copy.words_at(places)
        found = [np.empty(0, np.uint64)]
        for number in range(first, stop):
            source = self._pairs[number][1]
            flat = np.lib.stride_tricks.as_strided(source, (_reach(source),), (source.itemsize,))
            at = self._places[self._ends[number] : self._ends[number + 1], 0] - np.uint64(source.ctypes.data)
            found.append(flat[at.astype(np.int64) // source.itemsize].astype(np.uint64))
        return np.concatenate(found)


def _axes(sources: Sequence[Array]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Of every source the length of an axis and its step in bytes, from the axis whose elements are the closest on."""
    depth = max((source.ndim for source in sources), default=0)
    lengths, steps = np.ones((2, depth, len(sources)), np.int64)
    for number, source in enumerate(sources):
        nearest_first = sorted(zip(source.strides, source.shape, strict=True))
        steps[: source.ndim, number], lengths[: source.ndim, number] = zip(*nearest_first, strict=True)
    return list(zip(lengths, steps, strict=True))


def _reach(source: Array) -> int:
    """The elements from the first one of a source to its last one, in memory."""
    steps = zip(source.shape, source.strides, strict=True)
    octets: int = sum((length - 1) * step for length, step in steps)
    return 1 + octets // source.itemsize

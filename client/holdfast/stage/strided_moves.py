"""Moves of memory that is not contiguous, such as a weight that is stored transposed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.memory import native_copy
from holdfast.memory.native_copy import NotedElements
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
        self._sizes = np.array([source.itemsize for _, source in pairs], np.uint64)[of]
        self._table = _table([source for _, source in pairs], stretches)
        self._noted = NotedElements(np.zeros((len(of), 2), np.uint64), np.zeros(len(of), np.uint64))

    def read(self, seed: int) -> NotedElements:
        """The present elements of the sources at places that are drawn from the seed. Moves with the same sources take them
        as well.
        """
        if self._table is not None:
            return native_copy.elements_of(self._table, len(self._begins), seed)
        drawn = native_copy.mix(np.arange(len(self._begins), dtype=np.uint64) + np.uint64(seed)) >> np.uint64(32)
        rest = self._begins + (drawn * self._lengths >> np.uint64(32)).astype(np.int64)
        addresses = self._bases.copy()
        for lengths, steps in self._axes:
            rest, at = np.divmod(rest, lengths)
            addresses += at * steps
        places = np.stack([addresses.astype(np.uint64), self._sizes], axis=1)
        return NotedElements(places, self._at(places, 0, len(self._pairs)))

    def noted(self, elements: NotedElements) -> None:
        """Record elements of the sources, as `read` returns them."""
        self._noted = elements

    def copy(self, number: int) -> bool:
        """Copy a source; return whether it differs from what was noted of it, read again after the copy."""
        transfer.copy(*self._pairs[number])
        own = slice(self._ends[number], self._ends[number + 1])
        places, values = self._noted
        return not np.array_equal(values[own], self._at(places[own], number, number + 1))

    def _at(self, places: NDArray[np.uint64], first: int, stop: int) -> NDArray[np.uint64]:
        """What is at these places, which are in the sources from the first one on."""
        if native_copy.available():
            return native_copy.words_at(places)
        found = [np.empty(0, np.uint64)]
        for number in range(first, stop):
            source = self._pairs[number][1]
            flat = np.lib.stride_tricks.as_strided(source, (_reach(source),), (source.itemsize,))
            own = slice(self._ends[number] - self._ends[first], self._ends[number + 1] - self._ends[first])
            at = places[own, 0] - np.uint64(source.ctypes.data)
            found.append(flat[at.astype(np.int64) // source.itemsize].astype(np.uint64))
        return np.concatenate(found)


def _table(sources: Sequence[Array], stretches: NDArray[np.int64]) -> NDArray[np.uint64] | None:
    """The sources as `native_copy.elements_of` reads them; None without the library, or if one has too many axes."""
    axes, most = _axes(sources), native_copy.AXES_MAX
    if not native_copy.available() or len(axes) > most:
        return None
    table = np.zeros((len(sources), 5 + 2 * most), np.int64)
    table[:, :3] = np.array([(one.ctypes.data, one.size, one.itemsize) for one in sources], np.int64).reshape(-1, 3)
    table[:, 3], table[:, 4] = stretches, len(axes)
    for number, (lengths, steps) in enumerate(axes):
        table[:, 5 + number], table[:, 5 + most + number] = lengths, steps
    return table.view(np.uint64)


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

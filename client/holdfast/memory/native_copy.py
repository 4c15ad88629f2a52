"""Copies memory past the CPU caches and samples it, in C (`native_copy.c`) if that was built, else with numpy.

A copy of uncached memory takes two thirds of the time this way, and the training keeps its caches. The library is built with
the package if there is an x86-64 and a compiler (`hatch_build.py`); other processors detect long copies by themselves.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import digest
from holdfast_formats.disk.manifests import Extent

WORD_BYTES = 8
RARE = 16  # stretches of which one word is compared with the target's
LIBRARY = Path(__file__).with_name("_native_copy.so")

Array = NDArray[Any]


def _load() -> Any:
    """The library, whose functions run without the GIL; None if it was not built, or not for this machine."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.holdfast_copy.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        library.holdfast_copy_one.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        library.holdfast_copy.restype = library.holdfast_copy_one.restype = None
        noted = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p)
        library.holdfast_note.argtypes = noted
        library.holdfast_copy_noted.argtypes = (*noted, ctypes.c_void_p, ctypes.c_void_p)
        library.holdfast_compare.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        library.holdfast_note_strided.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        library.holdfast_note_strided.restype = None
        library.holdfast_note.restype = library.holdfast_copy_noted.restype = library.holdfast_compare.restype = None
        library.holdfast_prove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        library.holdfast_prove_file.argtypes = (ctypes.c_int, ctypes.c_int64, *library.holdfast_prove.argtypes[1:])
        library.holdfast_digest.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
        library.holdfast_sample.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_uint64,
            ctypes.c_void_p,
            ctypes.c_void_p,
        )
        library.holdfast_digest.restype = library.holdfast_sample.restype = None
        library.holdfast_prove.restype = library.holdfast_prove_file.restype = ctypes.c_size_t
    except (OSError, AttributeError):
        return None
    return library


_library = _load()


def library() -> Any:
    return _library


def available() -> bool:
    return _library is not None


def is_plain(target: Array, source: Array) -> bool:
    """Whether the bytes of one can be copied over those of the other as they are."""
    whole = target.flags.c_contiguous and source.flags.c_contiguous and target.flags.writeable
    return whole and (target.dtype, target.shape) == (source.dtype, source.shape)


class PairCopies:
    """Pairs of a target and a source, plain and without overlap: one call copies them all."""

    def __init__(self, pairs: Sequence[tuple[Array, Array]]) -> None:
        """Raises `ValueError` for a pair that is not plain."""
        if not all(is_plain(*pair) for pair in pairs):
            raise ValueError("only plain arrays are copied by their bytes")
        self.pairs = pairs
        self.table = np.array([(t.ctypes.data, s.ctypes.data, t.nbytes) for t, s in pairs], np.uint64).reshape(-1, 3)

    def do(self) -> None:
        """Copy them, without the GIL."""
        if _library is not None:
            _library.holdfast_copy(self.table.ctypes.data, len(self.table))
            return
        for target, source in self.pairs:
            np.copyto(target, source)


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes over bytes, past the caches and without the GIL. Raises `ValueError` if their lengths differ."""
    into, data = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    if _library is None:
        np.copyto(into, data)
    elif target.readonly or len(into) != len(data):
        raise ValueError(f"{len(data)} bytes cannot be copied over {len(into)}")
    else:
        _library.holdfast_copy_one(into.ctypes.data, data.ctypes.data, len(data))


def digests(boxes: NDArray[np.uint64], native: int, step: int | None) -> NDArray[np.uint64]:
    """The digests of boxes (rows of address and bytes), of a sample if `step` is given, else of all bytes; needs the
    library. `native` is the address of the digest function.
    """
    boxes, values = np.ascontiguousarray(boxes), np.empty(len(boxes), np.uint64)
    if step is None:
        _library.holdfast_digest(boxes.ctypes.data, len(boxes), native, values.ctypes.data)
    else:
        _library.holdfast_sample(boxes.ctypes.data, len(boxes), step, native, values.ctypes.data)
    return values


class NotedWords(NamedTuple):
    """One word of each stretch of some sources, as they were at one moment, at places that are drawn from the seed."""

    seed: int
    values: NDArray[np.uint64]


class CopyOutcome(NamedTuple):
    """Of each source: whether it differs from the recorded words, each compared after its stretch was copied; and whether
    its target had other bytes, or was not looked at.
    """

    changed: NDArray[np.bool_]
    wrote: NDArray[np.bool_]


class Noted:
    """Pairs of a target and a source: words of the sources are recorded first, and all is copied later.

    The copy detects sources that changed in between. Of every stretch a word of eight bytes is recorded, at the place that
    `note` chooses. Used by one save at a time.
    """

    def __init__(self, pairs: Sequence[tuple[Array, Array]], stretch: int) -> None:
        """`stretch` is in bytes, a multiple of eight. Raises `ValueError` for a pair that is not plain."""
        self.stretch = stretch
        self._copies = PairCopies(pairs)
        self.octets = [source.reshape(-1).view(np.uint8) for _, source in pairs]
        self._seed = 0
        self.words = sum(-(-len(octets) // stretch) for octets in self.octets)
        self._values = np.empty(0, np.uint64)
        self._changed, self._wrote = np.zeros(len(pairs), np.uint8), np.zeros(len(pairs), np.uint8)

    @property
    def table(self) -> NDArray[np.uint64]:
        """Rows of: target, source, bytes."""
        return self._copies.table

    def noted(self, words: NotedWords) -> None:
        """Record words of the sources, as `read` returns them. Raises `ValueError` if they are of other sources."""
        if len(words.values) != self.words:
            raise ValueError(f"{len(words.values)} words are not one of each of {self.words} stretches")
        self._seed, self._values = words.seed, words.values

    def copy(self, renew: bool = False) -> CopyOutcome:
        """Copy all, without the GIL. With `renew`, stretches whose target has the same bytes are not written."""
        table, values = self._copies.table, self._values.ctypes.data
        changed, wrote = self._changed, self._wrote
        wrote[:] = 1
        if _library is not None:
            said = wrote.ctypes.data if renew else None
            _library.holdfast_copy_noted(
                table.ctypes.data, len(table), self.stretch, self._seed, values, changed.ctypes.data, said
            )
        else:
            for number, (target, octets) in enumerate(zip(self.targets(), self.octets, strict=True)):
                if renew and np.array_equal(target, octets):
                    wrote[number] = 0
                else:
                    np.copyto(target, octets)
            different = self._values != _words(self.octets, self.stretch, self._seed)
            ends = np.cumsum([-(-len(octets) // self.stretch) for octets in self.octets])
            changed[:] = [part.any() for part in np.split(different, ends[:-1])] if len(ends) else []
        return CopyOutcome(changed.astype(np.bool_), wrote.astype(np.bool_))

    def differing(self) -> NDArray[np.bool_]:
        """Which targets have other bytes than their sources now. Nothing is copied."""
        if _library is None:
            return np.array([not np.array_equal(*pair) for pair in zip(self.targets(), self.octets, strict=True)], np.bool_)
        differs = np.empty(len(self.table), np.uint8)
        _library.holdfast_compare(self.table.ctypes.data, len(self.table), differs.ctypes.data)
        return differs.astype(np.bool_)

    def targets(self) -> list[NDArray[np.uint8]]:
        """The bytes of the targets; `octets` are those of the sources."""
        return [target.reshape(-1).view(np.uint8) for target, _ in self._copies.pairs]


class NotedSources:
    """The sources of several parts, which have the same stretch.

    Each word is on a page of its own, which is in no cache. One call that requests many of them at a time, across the
    borders of parts, takes half to two thirds of the time of one call per part.
    """

    def __init__(self, parts: Sequence[Noted]) -> None:
        self._parts, self._begins = parts, [0, *accumulate(part.words for part in parts)]
        self._table = _table(parts, _SOURCE) if parts and _library is not None else None

    def read(self, seed: int) -> list[NotedWords]:
        """The present words of each part."""
        if self._table is None:
            seeds = [seed + begin for begin in self._begins[:-1]]
            words = [_words(part.octets, part.stretch, own) for part, own in zip(self._parts, seeds, strict=True)]
        else:
            values = np.empty(self._begins[-1], np.uint64)
            stretch = self._parts[0].stretch
            _library.holdfast_note(self._table.ctypes.data, len(self._table), stretch, seed, values.ctypes.data)
            words = [values[begin:end] for begin, end in pairwise(self._begins)]
        return [NotedWords(seed + begin, of_part) for begin, of_part in zip(self._begins, words, strict=False)]


def alike(parts: Sequence[Noted], seed: int) -> list[bool]:
    """Of each part, whether its targets have the same words as its sources, as far as a few are looked at."""
    if not parts:
        return []
    stretch = RARE * max(part.stretch for part in parts)
    if _library is None:
        return [bool((_words(part.targets(), stretch, seed) == _words(part.octets, stretch, seed)).all()) for part in parts]
    same = _noted(parts, stretch, seed, _SOURCE) == _noted(parts, stretch, seed, _TARGET)
    words = [sum(-(-len(octets) // stretch) for octets in part.octets) for part in parts]
    return [bool(part.all()) for part in np.split(same, np.cumsum(words)[:-1])]


_TARGET, _SOURCE = [1, 0, 2], [0, 1, 2]  # which column of a table is read


def _table(parts: Sequence[Noted], columns: list[int]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(np.concatenate([part.table for part in parts])[:, columns])


def _noted(parts: Sequence[Noted], stretch: int, seed: int, columns: list[int]) -> NDArray[np.uint64]:
    table = _table(parts, columns)
    values = np.empty(int((-(-table[:, 2].astype(np.int64) // stretch)).sum()), np.uint64)
    _library.holdfast_note(table.ctypes.data, len(table), stretch, seed, values.ctypes.data)
    return values


AXES_MAX = 8


class NotedElements(NamedTuple):
    """Places of elements, as rows of address and bytes, and what was there at one moment."""

    places: NDArray[np.uint64]
    values: NDArray[np.uint64]


def elements_of(table: NDArray[np.uint64], count: int, seed: int) -> NotedElements:
    """One element of each of `count` stretches of memory with gaps, at places that are drawn from the seed. Needs the
    library. Rows of the table: address, elements, bytes of each, elements a stretch, axes; then `AXES_MAX` lengths of axes
    and as many steps in bytes, from the axis whose elements are the closest on.
    """
    found = NotedElements(np.empty((count, 2), np.uint64), np.empty(count, np.uint64))
    pointers = found.places.ctypes.data, found.values.ctypes.data
    _library.holdfast_note_strided(table.ctypes.data, len(table), seed, *pointers)
    return found


def words_at(places: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The values at places in memory: rows of address and length, of up to eight bytes. Needs the library."""
    table, values = np.zeros((len(places), 3), np.uint64), np.empty(len(places), np.uint64)
    table[:, 1:] = places
    _library.holdfast_note(table.ctypes.data, len(table), WORD_BYTES, 0, values.ctypes.data)
    return values


def _words(arrays: Sequence[NDArray[np.uint8]], stretch: int, seed: int) -> NDArray[np.uint64]:
    """The word of each stretch of these bytes."""
    found, number = [np.empty(0, np.uint64)], 0
    for octets in arrays:
        at = places(len(octets), stretch, seed, number)
        number += len(at)
        if len(octets) < WORD_BYTES:
            word = int.from_bytes(octets.tobytes(), "little")
            found.append(np.full(len(at), word, np.uint64))
        else:
            words = octets[at[:, None].astype(np.int64) + np.arange(WORD_BYTES)]
            found.append(np.ascontiguousarray(words).view("<u8").reshape(-1))
    return np.concatenate(found)


def places(size: int, stretch: int, seed: int, number: int) -> NDArray[np.uint64]:
    """The places of the noted words in so many bytes, one per stretch, counted from word `number` on."""
    begins = np.arange(0, size, stretch, dtype=np.uint64)
    words = (np.minimum(size - begins, np.uint64(stretch)) + np.uint64(WORD_BYTES - 1)) // np.uint64(WORD_BYTES)
    drawn = mix(np.arange(number, number + len(begins), dtype=np.uint64) + np.uint64(seed))
    at = begins + np.uint64(WORD_BYTES) * ((drawn >> np.uint64(32)) * words >> np.uint64(32))
    return np.minimum(at, np.uint64(max(size - WORD_BYTES, 0)))


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`replica_claims.mix` for many numbers."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_FIELDS = 3  # of an extent: its target, its length, its digest


def can_verify() -> bool:
    return available() and digest.native() is not None


class Extents:
    """Extents that follow one another where they are read, and the target of each, if it has one."""

    def __init__(self) -> None:
        self._rows = array("Q")
        self._targets: list[memoryview] = []  # keeps the targets alive
        self._bytes, self._nowhere = 0, False

    def add(self, extents: Sequence[Extent], into: memoryview | None) -> None:
        """`into` has its bytes once they are verified. Raises `ValueError` if its size is not theirs."""
        lengths = [extent.length for extent in extents]
        total = sum(lengths)
        at = 0
        if into is not None:
            if into.readonly or into.nbytes != total:
                raise ValueError(f"extents of {total} bytes do not match a target of {into.nbytes} bytes")
            at = np.frombuffer(into, np.uint8).ctypes.data
            self._targets.append(into)
        for extent, length in zip(extents, lengths, strict=True):
            self._rows.extend((at, length, int(extent.digest, 16)))
            at += length if into is not None else 0
        self._bytes += total
        self._nowhere |= into is None

    def take(self, data: memoryview) -> bool:
        """Whether `data` is these extents, which then are at their targets. If not, the first ones may be there."""
        if not can_verify() or data.nbytes != self._bytes:
            return False
        rows, count = self._table()
        there, at = np.frombuffer(data, np.uint8).ctypes.data, digest.native()
        return bool(library().holdfast_prove(there, rows, count, at) == count)

    def take_from(self, descriptor: int, offset: int) -> bool:
        """The same for a file's bytes from `offset` on, which all have targets: they are read and verified there.

        If this is False, a target may hold unverified bytes until the caller has read them again or zeroed them.
        """
        if not can_verify() or self._nowhere:
            return False
        rows, count = self._table()
        return bool(library().holdfast_prove_file(descriptor, offset, rows, count, digest.native()) == count)

    def _table(self) -> tuple[int, int]:
        return self._rows.buffer_info()[0], len(self._rows) // _FIELDS

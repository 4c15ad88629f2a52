"""Many extents proven, and handed over, by one call: without the GIL, which threads would else pass on after each of them.

By `native_copy.c`, where it was built, with the function that digests everywhere else. Otherwise, and wherever anything is
not as it should be, nothing is said but that: whoever asked looks again, slowly, and finds out what it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from holdfast.memory import native_copy
from holdfast_formats import digest
from holdfast_formats.disk.manifest import Extent

_FIELDS = 3  # of an extent: where it goes, how long it is, its digest


def available() -> bool:
    """Whether extents are proven this way here."""
    return native_copy.available() and digest.native() is not None


class Extents:
    """Extents that lie behind each other where they are read, and where each belongs, if anywhere."""

    def __init__(self) -> None:
        self._rows = array("Q")
        self._targets: list[memoryview] = []  # kept in place
        self._bytes, self._nowhere = 0, False

    def add(self, extents: Sequence[Extent], into: memoryview | None) -> None:
        """`into` has their bytes when they are proven. Raises `ValueError` where they would not be exactly its bytes."""
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
        """Whether `data` is these extents, all of them, which are where they belong now. Else the first ones may be."""
        if not available() or data.nbytes != self._bytes:
            return False
        rows, count = self._table()
        there, at = np.frombuffer(data, np.uint8).ctypes.data, digest.native()
        return bool(native_copy.library().holdfast_prove(there, rows, count, at) == count)

    def take_from(self, descriptor: int, offset: int) -> bool:
        """The same of a file's bytes from `offset` on, all of which belong somewhere: read there, and proven there.

        Where this is False, a place may hold what was not proven, until whoever asked has read it again or emptied it.
        """
        if not available() or self._nowhere:
            return False
        rows, count = self._table()
        return bool(native_copy.library().holdfast_prove_file(descriptor, offset, rows, count, digest.native()) == count)

    def _table(self) -> tuple[int, int]:
        return self._rows.buffer_info()[0], len(self._rows) // _FIELDS

"""Verifies many extents and moves them to their places in one call, without the GIL, which threads would pass on after each.

It uses `native_copy.c`, if built, with the usual digest function. On any failure it only returns False: the caller then
checks again, slowly, and finds the error.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from holdfast.memory import native_copy
from holdfast_formats import digest
from holdfast_formats.disk.manifests import Extent

_FIELDS = 3  # of an extent: its target, its length, its digest


def available() -> bool:
    return native_copy.available() and digest.native() is not None


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
        if not available() or data.nbytes != self._bytes:
            return False
        rows, count = self._table()
        there, at = np.frombuffer(data, np.uint8).ctypes.data, digest.native()
        return bool(native_copy.library().holdfast_prove(there, rows, count, at) == count)

    def take_from(self, descriptor: int, offset: int) -> bool:
        """The same for a file's bytes from `offset` on, which all have targets: they are read and verified there.

        If this is False, a target may hold unverified bytes until the caller has read them again or zeroed them.
        """
        if not available() or self._nowhere:
            return False
        rows, count = self._table()
        return bool(native_copy.library().holdfast_prove_file(descriptor, offset, rows, count, digest.native()) == count)

    def _table(self) -> tuple[int, int]:
        return self._rows.buffer_info()[0], len(self._rows) // _FIELDS

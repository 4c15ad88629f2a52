"""Decodes arrays whose bytes were pickled as Latin-1 text, by protocols below 3."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping.listing import FetchBox, ForeignTensor
from holdfast_formats.region import Box, Shape, byte_span
from holdfast_service.wings.convert.foreign.pickled.values import LatinArray
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

COUNT_BYTES = 2**20  # of text: after so many it is noted how many characters there were
SPAN_BYTES_MAX = 2**24  # of values decoded at once, among them those between the wanted ones


class LatinDecoder:
    """Decodes an array whose bytes were pickled as Latin-1 text, encoded as UTF-8, so that positions must be counted."""

    def __init__(self, array: LatinArray, dtype: str) -> None:
        self._array, self._dtype = array, dtypes.to_numpy(dtype)
        self._text = StoredArray(array.file, "", "U8", (array.length,), array.offset, (1,)).tensor("extra", "text")
        self._counts: list[int] = []  # characters before every `COUNT_BYTES` of text

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return (self._text,)

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        shape = self._array.shape
        if self._array.strides == strides(shape):
            return self._rows(box, shape, fetch)
        return self._rows(Box(box.offset[::-1], box.shape[::-1]), shape[::-1], fetch).T  # in Fortran's order

    def _rows(self, box: Box, shape: Shape, fetch: FetchBox) -> NDArray[Any]:
        """A box of the row-major array of this shape, read in spans of about `SPAN_BYTES_MAX`."""
        values = np.empty(box.shape, self._dtype)
        rows = max(SPAN_BYTES_MAX // max(prod(shape[1:]) * self._dtype.itemsize, 1), 1)
        for first in range(0, box.shape[0] if shape else 1, rows):
            part, into = box, values
            if shape:
                part = Box((box.offset[0] + first, *box.offset[1:]), (min(rows, box.shape[0] - first), *box.shape[1:]))
                into = values[first : first + rows]
            start, stop = byte_span(part, shape, 1)
            data = self._bytes(start * self._dtype.itemsize, stop * self._dtype.itemsize, fetch)
            into[...] = out_of(data.view(self._dtype), part, shape, start)
        return values

    def _bytes(self, start: int, stop: int, fetch: FetchBox) -> NDArray[np.uint8]:
        self._count(fetch)
        values_read = np.empty(stop - start, np.uint8)
        for block, before in enumerate(self._counts[:-1]):
            if before < stop and self._counts[block + 1] > start:
                text = self._block(block, fetch)
                leading = (text & 0xC0) != 0x80  # the first byte of each character
                places = np.flatnonzero(leading)
                low, high = max(start - before, 0), min(stop - before, len(places))
                chosen = places[low:high]
                following = np.append(text, np.uint8(0))[chosen + 1]
                wide = text[chosen] >= 0x80
                values = np.where(wide, (text[chosen] & 3) << 6 | following & 0x3F, text[chosen])
                values_read[before + low - start : before + high - start] = values
        return values_read

    def _block(self, block: int, fetch: FetchBox) -> NDArray[np.uint8]:
        """A block of text, from the first character that begins in it to the end of the last one."""
        start = block * COUNT_BYTES
        length = min(COUNT_BYTES + 1, self._array.length - start)
        text: NDArray[np.uint8] = fetch(self._text, Box((start,), (length,)))
        if length > COUNT_BYTES and text[-1] & 0xC0 != 0x80:
            text = text[:-1]
        return text

    def _count(self, fetch: FetchBox) -> None:
        if self._counts:
            return
        counts = [0]
        for number in range(-(-self._array.length // COUNT_BYTES)):
            text = self._block(number, fetch)
            following = (text & 0xC0) == 0x80
            wide = (text == 0xC2) | (text == 0xC3)
            plain = bool((wide | following | (text < 0x80)).all()) and bool((wide[:-1] == following[1:]).all())
            if not plain or wide[-1] or (following[0] and not number):
                raise self._damaged("is not stored as bytes")
            counts.append(counts[-1] + int(np.count_nonzero(~following)))
        wanted = prod(self._array.shape) * self._dtype.itemsize
        if counts[-1] != wanted:
            raise self._damaged(f"has {counts[-1]} bytes instead of {wanted}")
        self._counts = counts

    def _damaged(self, what: str) -> StateMismatch:
        text = f"{self._array.file}: the array at byte {self._array.offset} {what}"
        return StateMismatch(text, hint="copy the file again: it is not complete", file=self._array.file)


def out_of(values: NDArray[Any], box: Box, shape: Shape, start: int) -> NDArray[Any]:
    """The box of a row-major tensor of which `values` are the elements from `start` on."""
    steps = [step * values.itemsize for step in strides(shape)]
    first = sum(i * step for i, step in zip(box.offset, strides(shape), strict=True)) - start
    if not box.volume:
        return np.empty(box.shape, values.dtype)
    return np.lib.stride_tricks.as_strided(values[first:], box.shape, steps, writeable=False)

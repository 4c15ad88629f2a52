"""Which bytes of which slots a part of a file consists of, so that a node requests only these from others.

A box is in its slot row by row, in the order of the file. So a range of the file takes one range of the box's slot,
however the box lies in its tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod
from typing import NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.region import Box, byte_box, byte_view
from holdfast_formats.staging.plan import BoxOrigin, PlannedTensor
from holdfast_formats.tensors import TensorSpec


class SlotRange(NamedTuple):
    """The bytes [begin, end) of a rank's slot."""

    rank: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def slot_ranges(tensors: Iterable[PlannedTensor], begin: int, end: int, without: Collection[int] = ()) -> list[SlotRange]:
    """The slot ranges of the bytes [begin, end) of a file, by rank and place, adjacent ones joined.

    `tensors` are those of the file, or of that part of it. Ranks `without` are left out.
    """
    ranges = sorted(
        SlotRange(origin.rank, *placed)
        for tensor in tensors
        for origin in tensor.origins
        if origin.rank not in without
        for placed in in_slot(tensor.spec, origin, begin - tensor.start, end - tensor.start)
    )
    joined: list[SlotRange] = []
    for one in ranges:
        last = joined[-1] if joined else None
        if last is not None and last.rank == one.rank and one.begin <= last.end:
            joined[-1] = last._replace(end=max(last.end, one.end))
        else:
            joined.append(one)
    return joined


def in_slot(spec: TensorSpec, origin: BoxOrigin, low: int, high: int) -> list[tuple[int, int]]:
    """The slot range of the box's share of the tensor's bytes [low, high): at most one."""
    view = byte_view(spec.dtype, spec.shape, spec.name)
    box = byte_box(spec.dtype, origin.box, spec.shape, spec.name)
    first = _count_before(box, view.shape, max(low, 0) // view.itemsize)
    last = _count_before(box, view.shape, -(-min(high, spec.nbytes) // view.itemsize))
    if first >= last:
        return []
    width = dtypes.bits(origin.held_as) // 8 if origin.held_as else view.itemsize
    return [(origin.slot_offset + first * width, origin.slot_offset + last * width)]


def _count_before(box: Box, shape: tuple[int, ...], index: int) -> int:
    """Row-major elements of the box before the element `index` of a tensor of this shape."""
    if index >= prod(shape):
        return box.volume
    count = 0
    for dimension, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        place, index = divmod(index, prod(shape[dimension + 1 :]))
        below = prod(box.shape[dimension + 1 :])
        if place < offset:
            return count
        if place >= offset + size:
            return count + size * below
        count += (place - offset) * below
    return count

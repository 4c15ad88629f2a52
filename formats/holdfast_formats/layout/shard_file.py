"""A rank's shard as one safetensors file: its header, its length, and the contents of any window of its bytes.

Nothing is read here. A window is described as parts of stored tensors and their places, so the sender of a file holds
only one window of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.disk import safetensors
from holdfast_formats.disk.packing import FORMAT_METADATA
from holdfast_formats.disk.safetensors import FileTensor
from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout import parts
from holdfast_formats.layout.parts import LocalTensor, Part
from holdfast_formats.region import Shape, byte_box, byte_view

WINDOW_ALIGNMENT_BYTES = 8  # the widest element; tensors are in descending order of width, so this cuts no element


class PlacedTensor(NamedTuple):
    """A local tensor and its bytes [start, stop) of the file.

    `units` is the same tensor in addressable units of `itemsize` bytes: its elements, or bytes if elements are
    narrower. Its parts are in order of position; `starts` are their first positions, `reach` the largest stop up to
    each.
    """

    local: LocalTensor
    start: int
    stop: int
    units: LocalTensor
    itemsize: int
    starts: tuple[int, ...]
    reach: tuple[int, ...]


class Strip(NamedTuple):
    """A window's share of one local tensor: `units` units of `itemsize` bytes, `at` bytes into the window.

    The parts' positions are counted from there, and their boxes in units of their tensors; everything else is zero.
    """

    at: int
    units: int
    itemsize: int
    parts: tuple[Part, ...]

    @property
    def stop(self) -> int:
        return self.at + self.units * self.itemsize

    @property
    def is_padded(self) -> bool:
        return sum(part.box.volume for part in self.parts) < self.units


class ShardFile(NamedTuple):
    header: bytes
    tensors: tuple[PlacedTensor, ...]
    bytes: int


def describe(run: str, step: int, layout: str, rank: int, group: str, program: str = "") -> dict[str, str]:
    """The metadata in a shard's file; `layout` is the canonical text, `program` the name of one that made the tensors."""
    metadata = {"run": run, "step": str(step), "layout": layout, "rank": str(rank), "group": group}
    return {**metadata, "program": program} if program else metadata


def lay_out(tensors: Sequence[LocalTensor], shapes: Mapping[str, Shape], metadata: Mapping[str, str]) -> ShardFile:
    """The file of these local tensors, whose parts are of stored tensors with these shapes, in elements.

    Tensors are in the safetensors library's order. Raises `StateMismatch` for a duplicate name, and, with its name, for a
    tensor that does not end at a byte, or that is cut inside a byte if its elements are narrower than one.
    """
    order = safetensors.storage_order((local.name, local.dtype) for local in tensors)
    stored: list[FileTensor] = []
    end = 0
    for local in (tensors[position] for position in order):
        size = dtypes.nbytes(local.dtype, local.volume, local.name)
        stored.append(FileTensor(local.name, local.dtype, local.shape, end, end + size))
        end += size
    header = safetensors.encode(stored, {**FORMAT_METADATA, **metadata})
    placed = [_place(tensors[i], len(header) + entry.start, shapes) for i, entry in zip(order, stored, strict=True)]
    return ShardFile(header, tuple(placed), len(header) + end)


def windows(file: ShardFile, start: int, stop: int, window_bytes: int) -> Iterator[tuple[int, int]]:
    """Windows that cover bytes [start, stop) of the file after its header, cut at multiples of `window_bytes`.

    The first may begin before `start` and the last end after `stop`, so that none cuts an element.
    """
    low = max(start, len(file.header))
    low -= low % WINDOW_ALIGNMENT_BYTES
    stop = min(stop + -stop % WINDOW_ALIGNMENT_BYTES, file.bytes)
    while low < stop:
        high = min(low - low % window_bytes + window_bytes, stop)
        yield low, high
        low = high


def strips(file: ShardFile, low: int, high: int) -> list[Strip]:
    """The contents of bytes [low, high) of the file, which are one of `windows`."""
    found: list[Strip] = []
    first = bisect_right(file.tensors, low, key=lambda placed: placed.stop)
    for position in range(first, len(file.tensors)):
        placed = file.tensors[position]
        if placed.start >= high:
            break
        begin, end = max(placed.start, low), min(placed.stop, high)
        if begin < end:
            found.append(_strip(placed, begin, end)._replace(at=begin - low))
    return found


def _strip(placed: PlacedTensor, begin: int, end: int) -> Strip:
    first, last = (begin - placed.start) // placed.itemsize, (end - placed.start) // placed.itemsize
    candidates = placed.units.parts[bisect_right(placed.reach, first) : bisect_left(placed.starts, last)]
    pieces = tuple(piece for part in candidates for piece in parts.cut(part, first, last))
    return Strip(0, last - first, placed.itemsize, pieces)


def _place(local: LocalTensor, start: int, shapes: Mapping[str, Shape]) -> PlacedTensor:
    units, itemsize = _in_units(local, shapes)
    units = units._replace(parts=tuple(sorted(units.parts, key=lambda part: part.start)))
    return PlacedTensor(
        local=local,
        start=start,
        stop=start + units.volume * itemsize,
        units=units,
        itemsize=itemsize,
        starts=tuple(part.start for part in units.parts),
        reach=tuple(accumulate((part.stop for part in units.parts), max)),
    )


def _in_units(local: LocalTensor, shapes: Mapping[str, Shape]) -> tuple[LocalTensor, int]:
    width = dtypes.bits(local.dtype)
    if width % 8 == 0:
        return local, width // 8
    octets = tuple(_in_octets(local, part, shapes[part.tensor], width) for part in local.parts)
    return local._replace(shape=(dtypes.nbytes(local.dtype, local.volume, local.name),), parts=octets), 1


def _in_octets(local: LocalTensor, part: Part, shape: Shape, width: int) -> Part:
    """A part of elements narrower than a byte, as one of bytes; `StateMismatch` if it is cut inside a byte."""
    box = byte_box(local.dtype, part.box, shape, part.tensor)
    outer = part.strides[:-1]
    if len(byte_view(local.dtype, shape).shape) == len(shape):
        strides = (*(stride * width // 8 for stride in outer), 1)
        fits = part.strides[-1] == 1 and not any(n * width % 8 for n in (part.start, *outer))
    else:  # a whole tensor, as one row of bytes
        strides = (1,)
        fits = part.stop - part.start == part.box.volume and part.start * width % 8 == 0
    if not fits:
        raise StateMismatch(
            f"tensor {local.name!r}: {local.dtype} has {width} bits an element, and "
            f"{list(part.box.offset)}+{list(part.box.shape)} of {part.tensor!r} begins or ends inside a byte",
            hint="shard another dimension, or shard at a multiple of whole bytes",
        )
    return Part(part.tensor, box, part.start * width // 8, strides)

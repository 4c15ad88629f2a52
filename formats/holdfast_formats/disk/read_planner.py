"""The read planner: determines which extents hold what the ranks of a node want, so that each is read once.

Bytes must be verified before they are handed over, so whole extents are read (I7). Extents that are close together in a
file are read together, because a request costs more than a few unneeded bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from holdfast_formats.disk import verification
from holdfast_formats.disk.manifests import EXTENT_BYTES_MAX, Extent, Manifest, TensorEntry
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import StateMismatch
from holdfast_formats.near_names import did_you_mean, one_of
from holdfast_formats.region import (
    Box,
    ByteView,
    Shape,
    byte_box,
    byte_span,
    byte_view,
    check_box,
    next_inside,
    union_volume,
    widest_gap,
)

GAP_BYTES = 2**16  # gaps up to this are read and dropped, instead of making two requests
GAP_SHARE = 32  # gaps are at most one part in so many of what a read returns
READ_BYTES_MAX = EXTENT_BYTES_MAX

_offset = attrgetter("offset")


class WantedBox(NamedTuple):
    """A box of a tensor, in elements; an alias may be used as the name."""

    group: str
    name: str
    box: Box


class PlannedRead(NamedTuple):
    """Bytes [start, stop) of a file, and the wanted pieces in them, whole and in order; the gaps are dropped."""

    file: str
    start: int
    stop: int
    pieces: tuple[Piece, ...]


class ReadPlan(NamedTuple):
    """Reads by file and position. `needed` counts each wanted byte once, `read` all bytes of the reads with their gaps."""

    reads: tuple[PlannedRead, ...]
    needed: int
    read: int

    @property
    def ratio(self) -> float:
        return self.read / self.needed if self.needed else 1.0


class _Tensor:
    __slots__ = ("boxes", "entry", "group", "name")

    def __init__(self, group: str, name: str, entry: TensorEntry) -> None:
        self.group = group
        self.name = name
        self.entry = entry
        self.boxes: dict[Box, None] = {}


def plan(
    manifest: Manifest, wanted: Iterable[WantedBox], *, gap_bytes: int = GAP_BYTES, read_bytes_max: int = READ_BYTES_MAX
) -> ReadPlan:
    """The reads that return everything wanted, with every extent in exactly one of them, however often it is wanted.

    A read is no longer than `read_bytes_max`, unless it is a single extent that is longer. Raises `StateMismatch` with the
    name of a tensor or box that does not fit.
    """
    tensors: dict[tuple[str, str], _Tensor] = {}
    for group, name, box in wanted:
        stored, entry = resolve(manifest, group, name)
        known = tensors.get((group, stored))
        if known is None:
            known = tensors[group, stored] = _Tensor(group, stored, entry)
        if box not in known.boxes:
            check_box(box, entry.shape, name)
            known.boxes[box] = None
    needed = 0
    pieces: list[Piece] = []
    for tensor in sorted(tensors.values(), key=_place):
        ranges, useful = _touched(tensor)
        needed += useful
        group, name, entry = tensor.group, tensor.name, tensor.entry
        for first, stop in ranges:
            pieces += [verification.tensor_piece(group, name, entry, extent) for extent in entry.extents[first:stop]]
    reads = tuple(_coalesce(pieces, gap_bytes, read_bytes_max))
    return ReadPlan(reads, needed, sum(read.stop - read.start for read in reads))


def resolve(manifest: Manifest, group: str, name: str, label: str = "the checkpoint") -> tuple[str, TensorEntry]:
    """The stored tensor for a name, with aliases followed; `StateMismatch` with the name of a tensor that does not exist."""
    named = manifest.tensors.get(group, {})
    entry = named.get(name)
    if entry is not None:
        return name, entry
    stored = manifest.aliases.get(group, {}).get(name, name)
    if stored not in named:
        raise StateMismatch(
            f"{label} has no tensor {name!r} in group {group!r}",
            hint=_near(manifest, group, name),
        )
    return stored, named[stored]


def _near(manifest: Manifest, group: str, name: str) -> str:
    """The nearest tensors of the group; if there is no such group, the groups."""
    known = [*manifest.tensors.get(group, {}), *manifest.aliases.get(group, {})]
    if known:
        return did_you_mean(name, known, "`holdfast show` lists the tensors")
    return one_of(group, manifest.groups, "groups")


def extents_of(extents: Sequence[Extent], box: Box, view: ByteView) -> list[tuple[int, int]]:
    """The extents of a tensor that hold bytes of a box in `byte_view` coordinates.

    The result is index ranges [first, stop), ascending, with at least one other extent between each two of them.
    """
    start, stop = byte_span(box, view.shape, view.itemsize)
    if start == stop:
        return []
    first, last = _index(extents, start), _index(extents, stop - 1)
    if last - first < 2:
        return [(first, last + 1)]
    gap = widest_gap(box, view.shape, view.itemsize)
    if gap == 0 or gap < min(extent.length for extent in extents[first + 1 : last]):
        return [(first, last + 1)]  # too long to be between two runs
    ranges: list[tuple[int, int]] = []
    at: int | None = start // view.itemsize
    while at is not None:
        index = _index(extents, at * view.itemsize)
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
        at = next_inside(box, view.shape, (extents[index].offset + extents[index].length) // view.itemsize)
    return ranges


def _touched(tensor: _Tensor) -> tuple[list[tuple[int, int]], int]:
    """Index ranges of the extents that a tensor's boxes need, and the bytes in the boxes."""
    entry, boxes = tensor.entry, tensor.boxes
    extents = entry.extents
    if not extents:
        return [], 0
    if any(box.shape == entry.shape for box in boxes):
        return [(0, len(extents))], extents[-1].offset + extents[-1].length
    view = byte_view(entry.dtype, entry.shape, tensor.name)
    inside = [byte_box(entry.dtype, box, entry.shape, tensor.name) for box in _joined(boxes, entry.shape)]
    needed = union_volume(inside) * view.itemsize
    if len(inside) == 1:
        return extents_of(extents, inside[0], view), needed
    merged: list[tuple[int, int]] = []
    for first, stop in sorted(extent for box in inside for extent in extents_of(extents, box, view)):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((first, stop))
    return merged, needed


def _joined(boxes: Collection[Box], shape: Shape) -> Collection[Box]:
    """Join boxes of whole rows, if there are no others: many ranks cut dimension 0."""
    if len(boxes) == 1 or any(box.shape[1:] != shape[1:] for box in boxes):
        return boxes
    ends: list[list[int]] = []
    for low, rows in sorted((box.offset[0], box.shape[0]) for box in boxes):
        if ends and low <= ends[-1][1]:
            ends[-1][1] = max(ends[-1][1], low + rows)
        else:
            ends.append([low, low + rows])
    return [Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:])) for low, high in ends]


def _index(extents: Sequence[Extent], offset: int) -> int:
    return bisect_right(extents, offset, key=_offset) - 1


def _place(tensor: _Tensor) -> tuple[str, int]:
    return tensor.entry.file, tensor.entry.start


def _coalesce(pieces: Sequence[Piece], gap_bytes: int, read_bytes_max: int) -> Iterator[PlannedRead]:
    """Join pieces in file order into reads."""
    held: list[Piece] = []
    file, start, stop, dropped = "", 0, 0, 0
    for piece in pieces:
        end, gap = piece.start + piece.length, piece.start - stop
        apart = gap and (gap > gap_bytes or (dropped + gap) * GAP_SHARE > stop - start)
        if held and (apart or end - start > read_bytes_max or piece.file != file):
            yield PlannedRead(file, start, stop, tuple(held))
            held = []
        if not held:
            file, start, dropped, gap = piece.file, piece.start, 0, 0
        held.append(piece)
        dropped += gap
        stop = end
    if held:
        yield PlannedRead(file, start, stop, tuple(held))

"""What somebody wants of a checkpoint's tensors, and what that means for its pieces: which are read, and who receives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import proof, transfer
from holdfast_formats.errors import StateMismatch
from holdfast_formats.manifest import Manifest, TensorEntry
from holdfast_formats.proof import Piece
from holdfast_formats.reading import resolve
from holdfast_formats.region import Box, ByteView, byte_box, byte_span, byte_view, check_box, flat_boxes, intersect


class Want(NamedTuple):
    """A box of a tensor, in elements, and the array that receives it.

    `into` is writable, may be strided, and has the shape of the box in `region.byte_view` coordinates and the unsigned
    dtype `transfer.element_dtype(itemsize)`.
    """

    group: str
    name: str
    box: Box
    into: NDArray[Any]


class Receiver(NamedTuple):
    """A want, resolved; shape and box are in `byte_view` coordinates.

    Where the tensor's bytes from `first` on lie in the receiver as they lie in the file, `octets` are the receiver's bytes.
    """

    into: NDArray[Any]
    view: ByteView
    box: Box
    first: int
    octets: memoryview | None

    def take(self, offset: int, data: memoryview) -> None:
        """Copy what the receiver wants of these bytes, which stand in the tensor from `offset` on."""
        if self.octets is None:
            elements = np.frombuffer(data, transfer.element_dtype(self.view.itemsize))
            start = offset // self.view.itemsize
            transfer.move(transfer.Direction.SCATTER, elements, start, self.into, self.box, self.view.shape)
            return
        low, high = max(self.first - offset, 0), min(self.first + len(self.octets) - offset, len(data))
        at = low + offset - self.first
        self.octets[at : at + high - low] = data[low:high]


class Touched:
    """A piece that is read, and who receives from it; `part_digest` is what `passes.prove` leaves to `passes.hand_over`."""

    __slots__ = ("part_digest", "piece", "receivers")

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.receivers: list[Receiver] = []
        self.part_digest: str | None = None

    @property
    def part(self) -> tuple[int, memoryview] | None:
        """The bytes of the one receiver that they can be read into as they are, and where in the piece they begin."""
        if len(self.receivers) != 1:
            return None
        octets, first, offset = self.receivers[0].octets, self.receivers[0].first, self.piece.offset
        if octets is None:
            return None
        low, high = max(first - offset, 0), min(first + len(octets) - offset, self.piece.length)
        return low, octets[low + offset - first : high + offset - first]


def touched(manifest: Manifest, wants: Iterable[Want], label: str) -> list[Touched]:
    """The pieces that the wants need, by file and position. Raises `StateMismatch` naming a tensor that does not fit."""
    found: dict[tuple[str, int], Touched] = {}
    for want in wants:
        name, entry = resolve(manifest, want.group, want.name, label)
        receiver = _receiver(want, entry)
        for piece in _pieces(receiver, want.group, name, entry):
            key = (piece.file, piece.start)
            if key not in found:
                found[key] = Touched(piece)
            found[key].receivers.append(receiver)
    return sorted(found.values(), key=attrgetter("piece"))


def _receiver(want: Want, entry: TensorEntry) -> Receiver:
    into, view = want.into, byte_view(entry.dtype, entry.shape, want.name)
    if want.box.shape == entry.shape and not any(want.box.offset):
        box, span = Box((0,) * len(view.shape), view.shape), (0, entry.nbytes)
    else:
        check_box(want.box, entry.shape, want.name)
        box = byte_box(entry.dtype, want.box, entry.shape, want.name)
        span = byte_span(box, view.shape, view.itemsize)
    if into.shape != box.shape or into.dtype != transfer.element_dtype(view.itemsize):
        raise StateMismatch(
            f"tensor {want.name!r}: {into.dtype}{list(into.shape)} cannot receive "
            f"{view.itemsize}-byte elements of shape {list(box.shape)}"
        )
    straight = into.flags.c_contiguous and into.nbytes == span[1] - span[0]
    octets = into.reshape(-1).view(np.uint8).data if straight else None
    return Receiver(into, view, box, span[0], octets)


def _pieces(receiver: Receiver, group: str, name: str, entry: TensorEntry) -> Iterator[Piece]:
    itemsize, shape = receiver.view.itemsize, receiver.view.shape
    start = receiver.first
    stop = start + len(receiver.octets) if receiver.octets is not None else byte_span(receiver.box, shape, itemsize)[1]
    for extent in entry.extents:
        if extent.offset >= stop or extent.offset + extent.length <= start:
            continue
        if receiver.octets is None:
            parts = flat_boxes(extent.offset // itemsize, (extent.offset + extent.length) // itemsize, shape)
            if all(intersect(part, receiver.box) is None for part in parts):
                continue
        yield proof.tensor_piece(group, name, entry, extent)

"""Between live tensors and bytes: into a slot on save, out of a checkpoint's extents on restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast_formats import table
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.table import Blob, SlotTable
from holdfast_formats.tensors import Fragment as StagedFragment
from holdfast_formats.tensors import TensorSpec

from .copier import Move
from .fragments import Piece
from .reader import Want
from .state import Leaf, Snapshot

ALIGNMENT_BYTES = 64  # a cache line: where each fragment begins in its slot
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


class Copy(NamedTuple):
    """One copy into the slot: a live view, the first byte of its place, and whether training may change it at any time."""

    name: str
    tensor: torch.Tensor
    slot_offset: int
    restless: bool


class Mark(NamedTuple):
    """How far a layout had got behind one leaf: copies so far, and the first free byte."""

    copies: int
    end: int


class Layout(NamedTuple):
    """Where everything one rank saves stands in its slot, and the copies that bring it there."""

    leaves: tuple[Leaf, ...]
    marks: tuple[Mark, ...]  # one a leaf
    fragments: tuple[StagedFragment, ...]  # one a leaf
    copies: tuple[Copy, ...]
    blobs: tuple[tuple[Blob, bytes], ...]
    data_bytes: int


NOTHING = Layout((), (), (), (), (), 0)


class SaveIdentity(NamedTuple):
    """Whose part of which save a slot is."""

    run: str
    step: int
    attempt: int
    rank: int
    world: int


def lay_out(
    snapshot: Snapshot, assets: Mapping[str, bytes], settled: Callable[[Leaf, Piece], bool], before: Layout = NOTHING
) -> Layout:
    """Give every fragment and asset its place in a slot, in the order of the snapshot.

    `settled` says what only an optimizer's step changes, so that it may be copied while forward and backward run. Leaves
    that an earlier layout began with, the very same ones, keep their places without being looked at again.
    """
    kept = _common(before.leaves, snapshot.leaves)
    marks = list(before.marks[:kept])
    fragments = list(before.fragments[:kept])
    copies = list(before.copies[: marks[-1].copies if marks else 0])
    end = marks[-1].end if marks else 0
    for leaf in snapshot.leaves[kept:]:
        spec = TensorSpec(leaf.group, leaf.name, leaf.dtype, leaf.shape)
        spec.check()
        end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        boxes = tuple(piece.box for piece in leaf.pieces)
        fragments.append(StagedFragment(spec, boxes, end, leaf.placement))
        for piece in leaf.pieces:
            copies.append(Copy(leaf.path, piece.tensor, end, not settled(leaf, piece)))
            end += piece.tensor.numel() * piece.tensor.element_size()
        marks.append(Mark(len(copies), end))
    blobs = []
    for name, content in assets.items():
        blobs.append((Blob(name, end, len(content)), content))
        end += len(content)
    return Layout(snapshot.leaves, tuple(marks), tuple(fragments), tuple(copies), tuple(blobs), end)


def _common(before: Sequence[Leaf], now: Sequence[Leaf]) -> int:
    """How many leaves both begin with."""
    for position, (a, b) in enumerate(zip(before, now, strict=False)):
        if a is not b:
            return position
    return min(len(before), len(now))


def encode_table(
    who: SaveIdentity, snapshot: Snapshot, layout: Layout, metrics: Mapping[str, float], file_bytes_max: int
) -> bytes:
    """The slot's table: everything the daemon needs to save this rank's part without this rank."""
    return table.encode(
        SlotTable(
            *who,
            groups=snapshot.groups,
            fragments=layout.fragments,
            values=snapshot.values,
            aliases=snapshot.aliases,
            blobs=tuple(blob for blob, _ in layout.blobs),
            metrics=dict(metrics),
            mesh=snapshot.mesh,
            file_bytes_max=file_bytes_max,
        )
    )


def copy_in(layout: Layout, data: memoryview) -> None:
    """Copy everything into the slot; when this returns the slot holds the state as it was during the call."""
    copy_now(layout, data, layout.copies)


def copy_now(layout: Layout, data: memoryview, copies: Sequence[Copy]) -> None:
    """Copy these tensors and all assets into the slot, with every core, before returning."""
    if layout.data_bytes == 0:
        return
    moves = place(copies, data)
    with torch.no_grad():
        for move in moves:
            move.target.copy_(move.source, non_blocking=move.source.is_cuda)
    for device in {move.source.device for move in moves if move.source.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    for blob, content in layout.blobs:
        data[blob.slot_offset : blob.slot_offset + blob.length] = content


def place(copies: Sequence[Copy], data: memoryview) -> list[Move]:
    """Live memory and its place in the slot, as unsigned views of one shape; empty tensors are left out."""
    if not copies or len(data) == 0:
        return []
    slot = torch.frombuffer(data, dtype=torch.uint8)
    moves = []
    for copy in copies:
        size = copy.tensor.numel() * copy.tensor.element_size()
        if size:
            raw = _as_unsigned(copy.tensor)
            target = slot[copy.slot_offset : copy.slot_offset + size].view(raw.dtype).view(raw.shape)
            moves.append(Move(copy.name, raw, target))
    return moves


class Landing(NamedTuple):
    """A want, and the device copy that must follow it when the live tensor cannot be written by the CPU."""

    want: Want
    piece: Piece
    bounce: torch.Tensor | None


def land(leaves: Sequence[Leaf]) -> list[Landing]:
    """Where the bytes of every leaf must go: straight into live CPU memory, or into a bounce tensor beside a device's."""
    landings = []
    for leaf in leaves:
        for piece in leaf.pieces:
            raw = _as_unsigned(piece.tensor)
            bounce = None if raw.device.type == "cpu" else torch.empty(raw.shape, dtype=raw.dtype)
            array = (raw if bounce is None else bounce).numpy()
            landings.append(Landing(Want(leaf.group, leaf.name, piece.box, array), piece, bounce))
    return landings


def finish(landings: Sequence[Landing]) -> None:
    """Bring what landed in bounce tensors to its device."""
    with torch.no_grad():
        for landing in landings:
            if landing.bounce is not None:
                _as_unsigned(landing.piece.tensor).copy_(landing.bounce)


def _as_unsigned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as unsigned integers as wide as the elements: copies exactly, NaN payloads included."""
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidRequest("a lazily conjugated or negated tensor cannot be staged", hint="call resolve_conj() on it")
    wide = _UNSIGNED.get(tensor.element_size())
    if wide is None:
        raise InvalidRequest(f"{tensor.dtype} cannot be staged: its elements have {tensor.element_size()} bytes")
    return tensor.detach().view(wide)

"""Between live tensors and bytes: into a slot on save, out of a checkpoint's extents on restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from holdfast_formats import table
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.table import Blob, SlotTable
from holdfast_formats.tensors import Fragment as StagedFragment
from holdfast_formats.tensors import TensorSpec

from .fragments import Piece
from .reader import Want
from .state import Leaf, Snapshot

ALIGNMENT_BYTES = 64  # a cache line: where each fragment begins in its slot
_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


class Copy(NamedTuple):
    """One copy into the slot: a live view, and the first byte of its place."""

    tensor: torch.Tensor
    slot_offset: int


class Layout(NamedTuple):
    """Where everything one rank saves stands in its slot, and the copies that bring it there."""

    fragments: tuple[StagedFragment, ...]
    copies: tuple[Copy, ...]
    blobs: tuple[tuple[Blob, bytes], ...]
    data_bytes: int


class SaveIdentity(NamedTuple):
    """Whose part of which save a slot is."""

    run: str
    step: int
    attempt: int
    rank: int
    world: int


def lay_out(snapshot: Snapshot, assets: Mapping[str, bytes]) -> Layout:
    """Give every fragment and asset its place in a slot, in the order of the snapshot."""
    fragments: list[StagedFragment] = []
    copies: list[Copy] = []
    end = 0
    for leaf in snapshot.leaves:
        spec = TensorSpec(leaf.group, leaf.name, leaf.dtype, leaf.shape)
        spec.check()
        end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        boxes = tuple(piece.box for piece in leaf.pieces)
        fragments.append(StagedFragment(spec, boxes, end, leaf.placement))
        for piece in leaf.pieces:
            copies.append(Copy(piece.tensor, end))
            end += piece.tensor.numel() * piece.tensor.element_size()
    blobs = []
    for name, content in assets.items():
        blobs.append((Blob(name, end, len(content)), content))
        end += len(content)
    return Layout(tuple(fragments), tuple(copies), tuple(blobs), end)


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
    if layout.data_bytes == 0:
        return
    target = torch.frombuffer(data, dtype=torch.uint8)
    with torch.no_grad():
        for tensor, offset in layout.copies:
            size = tensor.numel() * tensor.element_size()
            if size == 0:
                continue
            raw = _as_unsigned(tensor)
            target[offset : offset + size].view(raw.dtype).view(raw.shape).copy_(raw, non_blocking=tensor.is_cuda)
    for device in {copy.tensor.device for copy in layout.copies if copy.tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    for blob, content in layout.blobs:
        data[blob.slot_offset : blob.slot_offset + blob.length] = content


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

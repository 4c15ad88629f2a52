"""Where live tensors stand in a slot, and what the slot's table says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from holdfast.stage.background_copy import Move
from holdfast.state.train_state import Leaf, Snapshot
from holdfast.tensors.fragments import LivePiece
from holdfast.tensors.torch_dtypes import SIGNED, as_integers
from holdfast_formats.disk.packing import FILE_BYTES_MAX, pack
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.staging import slot_table
from holdfast_formats.staging.arena import PAGE_BYTES
from holdfast_formats.staging.holdings import span_of
from holdfast_formats.staging.slot_table import Blob, SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec

ALIGNMENT_BYTES = 64  # a cache line: where each fragment begins in its slot
LONG_BYTES_MIN = 2**18  # a fragment whose place in a page matters, and is worth up to a page


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


class SlotLayout(NamedTuple):
    """Where everything one rank saves stands in its slot, and the copies that bring it there."""

    leaves: tuple[Leaf, ...]
    marks: tuple[Mark, ...]  # one a leaf
    fragments: tuple[StagedFragment, ...]  # one a leaf
    encoded: tuple[bytes, ...]  # each fragment as it stands in the table
    copies: tuple[Copy, ...]
    blobs: tuple[tuple[Blob, bytes], ...]
    data_bytes: int
    steady: int  # how many of the first copies are likely to be the same at the next save


NOTHING = SlotLayout((), (), (), (), (), (), 0, 0)


class SaveIdentity(NamedTuple):
    """Whose part of which save a slot is."""

    run: str
    step: int
    attempt: int
    rank: int
    world: int


def lay_out(
    snapshot: Snapshot,
    assets: Mapping[str, bytes],
    settled: Callable[[Leaf, LivePiece], bool],
    before: SlotLayout = NOTHING,
    file_bytes_max: int = FILE_BYTES_MAX,
) -> SlotLayout:
    """Give every fragment and asset its place in a slot, in the order of the snapshot.

    `settled` says what only an optimizer's step changes, so that it may be copied while forward and backward run. Leaves
    that an earlier layout began with, the very same ones, keep their places without being looked at again. Long fragments
    begin as far from the begin of a page as in files of `file_bytes_max`: a daemon writes them without copying them.
    """
    kept = common(before.leaves, snapshot.leaves)
    in_page = _places_in_page(snapshot.leaves, file_bytes_max) if any(map(_is_long, snapshot.leaves[kept:])) else {}
    marks = list(before.marks[:kept])
    fragments = list(before.fragments[:kept])
    encoded = list(before.encoded[:kept])
    copies = list(before.copies[: marks[-1].copies if marks else 0])
    end = marks[-1].end if marks else 0
    for leaf in snapshot.leaves[kept:]:
        spec = TensorSpec(leaf.group, leaf.name, leaf.dtype, leaf.shape)
        spec.check()
        place = in_page.get((leaf.group, leaf.name))
        end += -end % ALIGNMENT_BYTES if place is None else (place - end) % PAGE_BYTES
        boxes = tuple(piece.box for piece in leaf.pieces)
        fragments.append(StagedFragment(spec, boxes, end, leaf.placement))
        encoded.append(slot_table.encode_fragment(fragments[-1]))
        for piece in leaf.pieces:
            copies.append(Copy(leaf.path, piece.tensor, end, not settled(leaf, piece)))
            end += piece.tensor.numel() * piece.tensor.element_size()
        marks.append(Mark(len(copies), end))
    blobs = []
    for name, content in assets.items():
        blobs.append((Blob(name, end, len(content)), content))
        end += len(content)
    steady = marks[snapshot.steady - 1].copies if snapshot.steady else 0
    return SlotLayout(
        snapshot.leaves, tuple(marks), tuple(fragments), tuple(encoded), tuple(copies), tuple(blobs), end, steady
    )


def _places_in_page(leaves: Sequence[Leaf], file_bytes_max: int) -> dict[tuple[str, str], int]:
    """How far from the begin of a page of its file each long fragment stands, if it stands there in one piece.

    As if all ranks held the tensors that this one does. Where they do not, it is a guess, and bytes are copied once more.
    """
    long = {(leaf.group, leaf.name): leaf.pieces[0].box for leaf in leaves if _is_long(leaf)}
    specs = [TensorSpec(leaf.group, leaf.name, leaf.dtype, leaf.shape) for leaf in leaves]
    found = {}
    for spec, start in chain.from_iterable(file.tensors for file in pack(specs, file_bytes_max)):
        box = long.get((spec.group, spec.name))
        span = None if box is None else span_of(spec, box)
        if span is not None:
            found[spec.group, spec.name] = (start + span[0]) % PAGE_BYTES
    return found


def _is_long(leaf: Leaf) -> bool:
    return len(leaf.pieces) == 1 and leaf.pieces[0].tensor.nbytes >= LONG_BYTES_MIN


def common(before: Sequence[Leaf], now: Sequence[Leaf]) -> int:
    """How many leaves both begin with, the very same ones."""
    for position, (a, b) in enumerate(zip(before, now, strict=False)):
        if a is not b:
            return position
    return min(len(before), len(now))


def encode_table(
    who: SaveIdentity,
    snapshot: Snapshot,
    layout: SlotLayout,
    metrics: Mapping[str, float],
    file_bytes_max: int,
    intent: Intent = NO_INTENT,
) -> bytes:
    """The slot's table: everything the daemon needs to save this rank's part without this rank."""
    return slot_table.encode(
        SlotTable(
            *who,
            groups=snapshot.groups,
            fragments=(),
            values=snapshot.values,
            aliases=snapshot.aliases,
            blobs=tuple(blob for blob, _ in layout.blobs),
            metrics=dict(metrics),
            mesh=snapshot.mesh,
            file_bytes_max=file_bytes_max,
            restored=intent.restored,
            turn=intent.turn,
            existing=intent.existing,
            again=intent.again,
        ),
        layout.encoded,
    )


def place(copies: Sequence[Copy], data: memoryview) -> list[tuple[Copy, Move]]:
    """Live memory and its place in the slot, as integers of one shape, bytes where it is contiguous; no empty tensors."""
    if not copies or len(data) == 0:
        return []
    slot = torch.frombuffer(data, dtype=torch.uint8)
    moves = []
    for copy in copies:
        size = copy.tensor.numel() * copy.tensor.element_size()
        if size:
            raw = as_integers(copy.tensor, SIGNED)
            if raw.is_contiguous():
                raw = raw.as_strided((raw.numel(),), (1,)).view(torch.uint8)  # of one element the stride may be any
            target = slot[copy.slot_offset : copy.slot_offset + size].view(raw.dtype).view(raw.shape)
            moves.append((copy, Move(copy.name, raw, target)))
    return moves

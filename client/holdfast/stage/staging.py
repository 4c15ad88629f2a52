"""Lays out live tensors in a slot, and encodes the slot's table that describes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import NamedTuple

import torch

from holdfast.stage.background_copy import Move
from holdfast.state.train_state import Leaf, Snapshot
from holdfast.tensors.live_pieces import LivePiece
from holdfast.tensors.torch_dtypes import SIGNED, as_integers
from holdfast_formats import metric_values
from holdfast_formats.disk.packing import FILE_BYTES_MAX, pack
from holdfast_formats.errors import StateMismatch
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.staging import slot_table
from holdfast_formats.staging.arena import PAGE_BYTES
from holdfast_formats.staging.average import GROUP as EMA
from holdfast_formats.staging.average import AverageHandover
from holdfast_formats.staging.holdings import span_of
from holdfast_formats.staging.slot_table import Blob, SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec

ALIGNMENT_BYTES = 64  # a cache line: fragments in a slot begin at multiples of this
LONG_BYTES_MIN = 2**18  # for longer fragments the place in a page matters, and is worth up to a page


class Copy(NamedTuple):
    """One copy into the slot: a live view, the first byte of its place, whether training may change it at any time, and
    whether its bytes are expected to stay.
    """

    name: str
    tensor: torch.Tensor
    slot_offset: int
    restless: bool
    frozen: bool = False


class Spared(NamedTuple):
    """A tensor that another rank of this node stages: a view of its live bytes, and its part of the table."""

    name: str
    octets: torch.Tensor
    fragment: StagedFragment


class Mark(NamedTuple):
    """The state of a layout after one leaf: number of copies and of spared ones so far, and the first free byte."""

    copies: int
    spared: int
    end: int


class SlotLayout(NamedTuple):
    """Where everything that one rank saves is in its slot, and the copies that bring it there."""

    leaves: tuple[Leaf, ...]
    marks: tuple[Mark, ...]  # one per leaf
    fragments: tuple[StagedFragment, ...]  # one per leaf; of a spared one it has no boxes
    encoded: tuple[bytes, ...]  # each fragment as in the table
    copies: tuple[Copy, ...]
    spared: tuple[Spared, ...]
    blobs: tuple[tuple[Blob, bytes], ...]
    data_bytes: int
    steady: int  # how many of the first copies will probably be the same at the next save


NOTHING = SlotLayout((), (), (), (), (), (), (), 0, 0)


class AveragePart(NamedTuple):
    """The group `ema` of a save: its encoded fragments, its aliases, and the handover for the daemon."""

    encoded: tuple[bytes, ...]
    aliases: dict[str, str]
    boxes: int
    handover: AverageHandover


class SaveIdentity(NamedTuple):
    """The save and the rank that a slot belongs to."""

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
    spared: Callable[[Leaf], bool] = lambda leaf: False,
) -> SlotLayout:
    """Give every fragment and asset a place in a slot, in the order of the snapshot.

    `settled` returns which pieces only an optimizer's step changes, so that they may be copied during forward and
    backward. Leading leaves identical to those of an earlier layout keep their places. Long fragments have the page
    offset that they have in files of `file_bytes_max`, so that the daemon can write them without a copy. Settled leaves
    that are `spared` get no place.
    """
    kept = common(before.leaves, snapshot.leaves)
    in_page = places_in_page(snapshot.leaves, file_bytes_max) if any(map(_is_long, snapshot.leaves[kept:])) else {}
    marks = list(before.marks[:kept])
    fragments = list(before.fragments[:kept])
    encoded = list(before.encoded[:kept])
    last = marks[-1] if marks else Mark(0, 0, 0)
    copies, others = list(before.copies[: last.copies]), list(before.spared[: last.spared])
    end = last.end
    for leaf in snapshot.leaves[kept:]:
        spec = TensorSpec(leaf.group, leaf.name, leaf.dtype, leaf.shape)
        spec.check()
        pieces = leaf.pieces
        if spared(leaf) and settled(leaf, pieces[0]):
            octets = as_integers(pieces[0].tensor, SIGNED).view(-1).view(torch.uint8)
            others.append(Spared(leaf.path, octets, StagedFragment(spec, (pieces[0].box,), 0, leaf.placement)))
            pieces = ()
        place = in_page.get((leaf.group, leaf.name)) if pieces else None
        end += -end % ALIGNMENT_BYTES if place is None else (place - end) % PAGE_BYTES
        boxes = tuple(piece.box for piece in pieces)
        fragments.append(StagedFragment(spec, boxes, end, leaf.placement, leaf.rounded_from, leaf.frozen))
        encoded.append(slot_table.encode_fragment(fragments[-1]))
        stays = leaf.frozen and leaf.group != EMA  # an average is written at each update, even with what it is
        for piece in pieces:
            copies.append(Copy(leaf.path, piece.tensor, end, not settled(leaf, piece), stays))
            end += piece.tensor.numel() * piece.tensor.element_size()
        marks.append(Mark(len(copies), len(others), end))
    blobs = []
    for name, content in assets.items():
        blobs.append((Blob(name, end, len(content)), content))
        end += len(content)
    steady = marks[snapshot.steady - 1].copies if snapshot.steady else 0
    written = tuple(fragments), tuple(encoded), tuple(copies), tuple(others)
    return SlotLayout(snapshot.leaves, tuple(marks), *written, tuple(blobs), end, steady)


def refuse_parts(leaves: Iterable[Leaf]) -> None:
    """Refuse tensors of which this rank holds only a part: in a world of one no other rank saves the rest."""
    for leaf in leaves:
        held = sum(piece.box.volume for piece in leaf.pieces)
        if held < prod(leaf.shape) and not leaf.rounded_from:
            raise StateMismatch(
                f"tensor {leaf.name!r} of group {leaf.group!r}: this rank is alone, and holds {held} of its "
                f"{prod(leaf.shape)} elements ({leaf.placement})",
                hint="gather the tensor (full_tensor() of a DTensor), or let every rank construct a Checkpointer and save",
            )


def places_in_page(leaves: Sequence[Leaf], file_bytes_max: int) -> dict[tuple[str, str], int]:
    """The page offset of each long fragment in its file, if the fragment is contiguous there.

    Assumes that all ranks hold the same tensors as this one. Otherwise it is a guess, and the bytes are copied once
    more.
    """
    long = {(leaf.group, leaf.name): leaf.pieces[0].box for leaf in leaves if _is_long(leaf)}
    specs = [TensorSpec(leaf.group, leaf.name, leaf.dtype, leaf.shape) for leaf in leaves]
    places = {}
    for spec, start in chain.from_iterable(file.tensors for file in pack(specs, file_bytes_max)):
        box = long.get((spec.group, spec.name))
        span = None if box is None else span_of(spec, box)
        if span is not None:
            places[spec.group, spec.name] = (start + span[0]) % PAGE_BYTES
    return places


def _is_long(leaf: Leaf) -> bool:
    return len(leaf.pieces) == 1 and leaf.pieces[0].tensor.nbytes >= LONG_BYTES_MIN


def common(before: Sequence[Leaf], now: Sequence[Leaf]) -> int:
    for position, (a, b) in enumerate(zip(before, now, strict=False)):
        if a is not b:
            return position
    return min(len(before), len(now))


def encode_table(  # noqa: PLR0913 - each is one thing that a table says
    who: SaveIdentity,
    snapshot: Snapshot,
    layout: SlotLayout,
    metrics: Mapping[str, float],
    file_bytes_max: int,
    intent: Intent = NO_INTENT,
    average: AveragePart | None = None,
) -> bytes:
    """Everything the daemon needs to save this rank's part without this rank."""
    finite, words = metric_values.split(metrics)
    return slot_table.encode(
        SlotTable(
            *who,
            groups=snapshot.groups,
            fragments=(),
            values=snapshot.values,
            aliases=snapshot.aliases if average is None else {**snapshot.aliases, EMA: average.aliases},
            blobs=tuple(blob for blob, _ in layout.blobs),
            metrics=finite,
            nonfinite_metrics=words,
            mesh=snapshot.mesh,
            file_bytes_max=file_bytes_max,
            restored=intent.restored,
            turn=intent.turn,
            existing=intent.existing,
            again=intent.again,
            average=None if average is None else average.handover,
            unstaged=tuple(spared.fragment for spared in layout.spared),
        ),
        layout.encoded if average is None else layout.encoded + average.encoded,
    )


def place(copies: Sequence[Copy], data: memoryview) -> list[tuple[Copy, Move]]:
    """Live memory and its place in the slot, as integers of one shape (bytes if contiguous). No empty tensors."""
    if not copies or len(data) == 0:
        return []
    slot = torch.frombuffer(data, dtype=torch.uint8)
    moves = []
    for copy in copies:
        size = copy.tensor.numel() * copy.tensor.element_size()
        if size:
            raw = as_integers(copy.tensor, SIGNED)
            if raw.is_contiguous():
                raw = raw.as_strided((raw.numel(),), (1,)).view(torch.uint8)  # with one element the stride does not matter
            target = slot[copy.slot_offset : copy.slot_offset + size].view(raw.dtype).view(raw.shape)
            moves.append((copy, Move(copy.name, raw, target)))
    return moves

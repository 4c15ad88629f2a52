"""Lays out a group for its moving average: the place of each element in every update and in the daemon's accumulator."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from holdfast.read.requests import Want
from holdfast.stage.staging import ALIGNMENT_BYTES, AveragePart, Copy, places_in_page
from holdfast.tensors.leaves import RANK_PREFIX, Leaf
from holdfast.tensors.live_pieces import LivePiece
from holdfast_formats import dtypes, transfer
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import byte_view
from holdfast_formats.staging import average, slot_table
from holdfast_formats.staging.arena import PAGE_BYTES, page_aligned
from holdfast_formats.staging.average import GROUP, AverageHandover, AverageStretch
from holdfast_formats.tensors import StagedFragment, TensorSpec

_FLOATS = ("F64", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4", "C64")


class AverageLayout(NamedTuple):
    """Places of a group's elements. `fragments` are the average's, relative to its region; `apart` numbers the boxes
    that may differ between ranks.
    """

    leaves: tuple[Leaf, ...]
    copies: tuple[Copy, ...]
    stretches: tuple[AverageStretch, ...]
    fragments: tuple[StagedFragment, ...]
    aliases: Mapping[str, str]
    nbytes: int
    digest: str
    apart: tuple[int, ...] = ()


def lay_out(
    leaves: Sequence[Leaf],
    aliases: Mapping[str, str],
    buffers: Collection[int],
    settled: Callable[[Leaf, LivePiece], bool],
    file_bytes_max: int,
) -> AverageLayout:
    """Lay out the leaves. `buffers` are addresses of module buffers, which are copied, not averaged. `InvalidRequest`
    for F64 and 8-bit floats.
    """
    averaged = [_averaged(leaf, buffers) for leaf in leaves]
    in_page = places_in_page(averaged, file_bytes_max)
    end = 0
    copies: list[Copy] = []
    stretches: list[AverageStretch] = []
    fragments: list[StagedFragment] = []
    for leaf, kept in zip(leaves, averaged, strict=True):
        place = in_page.get(kept.key)
        end += -end % ALIGNMENT_BYTES if place is None else (place - end) % PAGE_BYTES
        spec = TensorSpec(GROUP, kept.name, kept.dtype, kept.shape)
        fragments.append(StagedFragment(spec, tuple(piece.box for piece in kept.pieces), end, kept.placement))
        for piece in leaf.pieces:
            size = dtypes.nbytes(kept.dtype, piece.box.volume, kept.name)
            if size:
                copies.append(Copy(leaf.path, piece.tensor, end, not settled(leaf, piece)))
                taken = leaf.dtype not in average.WIDENED or _is_buffer(leaf, buffers)
                stretches.append(
                    AverageStretch(end, size, "U8") if taken else AverageStretch(end, piece.box.volume, leaf.dtype)
                )
            end += size
    digest = average.layout_digest([stretches, fragments])
    owners = [leaf for leaf in leaves for _ in leaf.pieces]
    apart = tuple(number for number, leaf in enumerate(owners) if _may_differ(leaf, buffers))
    return AverageLayout(tuple(leaves), tuple(copies), tuple(stretches), tuple(fragments), dict(aliases), end, digest, apart)


def in_slot(layout: AverageLayout, data_bytes: int, handover: AverageHandover) -> AveragePart:
    """The group as the last part of a slot that has `data_bytes` without it."""
    start = page_aligned(data_bytes)
    moved = [StagedFragment(one.spec, one.boxes, start + one.slot_offset, one.placement) for one in layout.fragments]
    return AveragePart(
        tuple(map(slot_table.encode_fragment, moved)),
        dict(layout.aliases),
        sum(len(one.boxes) for one in moved),
        handover,
    )


def wants(layout: AverageLayout, memory: memoryview) -> list[Want]:
    """What a checkpoint has of the group `ema` of this rank, and the places in an update's memory where it goes."""
    octets = np.frombuffer(memory, np.uint8)
    found = []
    for fragment in layout.fragments:
        spec, at = fragment.spec, fragment.slot_offset
        for box in fragment.boxes:
            size = dtypes.nbytes(spec.dtype, box.volume, spec.name)
            view = byte_view(spec.dtype, box.shape, spec.name)
            into = octets[at : at + size].view(transfer.element_dtype(view.itemsize)).reshape(view.shape)
            found.append(Want(GROUP, spec.name, box, into))
            at += size
    return found


def _averaged(leaf: Leaf, buffers: Collection[int]) -> Leaf:
    if leaf.dtype in average.WIDENED and not _is_buffer(leaf, buffers):
        return leaf._replace(group=GROUP, dtype="F32")
    if leaf.dtype in _FLOATS and not _is_buffer(leaf, buffers):
        raise InvalidRequest(
            f"ema=: tensor {leaf.path!r} is {leaf.dtype}, and only F32, BF16 and F16 are averaged",
            hint='average its masters with of="master", or another group',
        )
    return leaf._replace(group=GROUP)


def _may_differ(leaf: Leaf, buffers: Collection[int]) -> bool:
    return leaf.alone or leaf.name.startswith(RANK_PREFIX) or _is_buffer(leaf, buffers)


def _is_buffer(leaf: Leaf, buffers: Collection[int]) -> bool:
    return any(piece.tensor.data_ptr() in buffers for piece in leaf.pieces)

"""Maps parts of local tensors to live memory, and zeroes their padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from holdfast.tensors.leaves import Key, Leaf
from holdfast.tensors.live_pieces import LivePiece
from holdfast.tensors.matching import MatchedLeaves
from holdfast.tensors.torch_dtypes import packing
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout import padding
from holdfast_formats.layout.parts import LocalTensor, Part, strides


def land(restoration: MatchedLeaves, held: Mapping[Key, LocalTensor], notes: Sequence[str]) -> MatchedLeaves:
    """The restoration with boxes of stored tensors instead of local tensors. Padding is zeroed once all is filled."""
    leaves: list[Leaf] = []
    zeroed = []
    for leaf in restoration.leaves:
        local = held.get(leaf.key) if leaf.plain else None
        if local is None:
            leaves.append(leaf)
            continue
        for part in local.parts if leaf.shape else local.parts[:1]:  # one number may stand for those of several tensors
            piece = LivePiece(part.box, view(leaf, part))
            leaves.append(Leaf(leaf.group, part.tensor, leaf.dtype, part.box.stop, (piece,), leaf.placement))
        if local.padding:
            zeroed.append(partial(_zero, leaf, padding.gaps(local)))
    return restoration._replace(
        leaves=tuple(leaves), notes=[*restoration.notes, *notes], actions=(*zeroed, *restoration.actions)
    )


def view(leaf: Leaf, part: Part) -> torch.Tensor:
    """The part's place in the live memory of its local tensor; `InvalidRequest` by name if that is not contiguous."""
    tensor = _memory(leaf)
    if part.start == 0 and part.box.shape == leaf.shape and part.strides == strides(leaf.shape):
        return tensor
    shape, steps, start, factor = part.box.shape, part.strides, part.start, packing(tensor.dtype)
    if factor > 1:
        if not shape or steps[-1] != 1 or any(n % factor for n in (start, shape[-1], *steps[:-1])):
            raise InvalidRequest(f"{leaf.path}: its part of {part.tensor!r} begins or ends inside a byte")
        shape, start = (*shape[:-1], shape[-1] // factor), start // factor
        steps = (*(step // factor for step in steps[:-1]), 1)
    if not tensor.is_contiguous():
        raise InvalidRequest(
            f"{leaf.path} is built of several stored tensors, so it must be contiguous", hint="make it contiguous()"
        )
    return tensor.as_strided(shape, steps, tensor.storage_offset() + start)


def _memory(leaf: Leaf) -> torch.Tensor:
    if len(leaf.pieces) != 1:
        raise InvalidRequest(f"{leaf.path} is empty, but the layout expects elements on this rank")
    return leaf.pieces[0].tensor


def _zero(leaf: Leaf, ranges: Sequence[tuple[int, int]]) -> None:
    tensor = _memory(leaf)
    width, factor = tensor.element_size(), packing(tensor.dtype)
    octets = tensor.view(-1).view(torch.uint8)
    with torch.no_grad():
        for start, stop in ranges:
            octets[start * width // factor : stop * width // factor].zero_()

"""Maps parts of local tensors to live memory, and zeroes their padding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import torch

from holdfast.tensors.leaves import Key, Leaf
from holdfast.tensors.live_pieces import LivePiece
from holdfast.tensors.matching import MatchedLeaves
from holdfast.tensors.torch_dtypes import packing
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout import padding
from holdfast_formats.layout.parts import LocalTensor, Part, strides
from holdfast_formats.mapping.box_moves import BoxMove, narrowed
from holdfast_formats.region import Box


def land(
    restoration: MatchedLeaves,
    held: Mapping[Key, LocalTensor],
    notes: Sequence[str],
    wholes: Mapping[Key, Sequence[BoxMove]],
) -> MatchedLeaves:
    """The restoration with boxes of stored tensors instead of local tensors, and of what a program makes whole. Zeroes
    padding at the end.
    """
    leaves: list[Leaf] = []
    zeroed = []
    for leaf in restoration.leaves:
        if leaf.key in wholes:
            for name, piece in whole_views(leaf, wholes[leaf.key]):
                leaves.append(Leaf(leaf.group, name, leaf.dtype, piece.box.stop, (piece,), leaf.placement))
            continue
        local = held.get(leaf.key) if leaf.plain else None
        if local is None:
            leaves.append(leaf)
            continue
        for part in local.parts if leaf.shape else local.parts[:1]:  # one number may be stored for several tensors
            piece = LivePiece(part.box, view(leaf, part))
            leaves.append(Leaf(leaf.group, part.tensor, leaf.dtype, part.box.stop, (piece,), leaf.placement))
        if local.padding:
            zeroed.append(partial(_zero, leaf, padding.gaps(local)))
    return restoration._replace(
        leaves=tuple(leaves), notes=[*restoration.notes, *notes], actions=(*zeroed, *restoration.actions)
    )


def view(leaf: Leaf, part: Part) -> torch.Tensor:
    """The part's place in its local tensor's memory; `InvalidRequest` if that is not contiguous."""
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


def whole_views(leaf: Leaf, moves: Sequence[BoxMove]) -> Iterator[tuple[str, LivePiece]]:
    """Boxes of stored tensors in the memory of a tensor that states its own place; `moves` make the whole one.

    Raises `InvalidRequest` for elements of less than a byte that would be rearranged.
    """
    for box, tensor in leaf.pieces:
        for move in moves:
            share = narrowed(move, box)
            if share is None:
                continue
            if packing(tensor.dtype) > 1 and (
                share.stepped or share.target != box or share.axes != tuple(range(len(box.shape)))
            ):
                raise InvalidRequest(f"{leaf.path}: elements of less than a byte are not rearranged by a program")
            for at, part in _apart(share, tensor if packing(tensor.dtype) > 1 else _turned(tensor, share, box)):
                yield move.source.name, LivePiece(at, part)


def _turned(tensor: torch.Tensor, share: BoxMove, box: Box) -> torch.Tensor:
    """The elements of a share as a view with the dimensions of its source; the tensor has those of `box`."""
    steps = share.target_step or (1,) * len(share.axes)
    index = tuple(
        o - c if axis is None else slice(o - c, o - c + (n - 1) * step + 1, step)
        for o, n, c, step, axis in zip(*share.target, box.offset, steps, share.axes, strict=True)
    )
    axes = [axis for axis in share.axes if axis is not None]
    view = tensor[index].permute(sorted(range(len(axes)), key=axes.__getitem__))
    for dimension in range(len(share.box.shape)):
        view = view if dimension in axes else view.unsqueeze(dimension)
    return view


def _apart(share: BoxMove, view: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """A share as boxes of its source: elements that are apart there are a box each."""
    box, steps = share.box, share.step or (1,) * len(share.box.shape)
    apart = [n if step > 1 else 1 for n, step in zip(box.shape, steps, strict=True)]
    shape = tuple(1 if step > 1 else n for n, step in zip(box.shape, steps, strict=True))
    for index in product(*map(range, apart)):
        offset = tuple(o + i * step for o, i, step in zip(box.offset, index, steps, strict=True))
        part = view
        for dimension, (i, n) in enumerate(zip(index, apart, strict=True)):
            part = part.narrow(dimension, i, 1) if n > 1 else part
        yield Box(offset, shape), part


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

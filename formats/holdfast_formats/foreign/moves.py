"""Maps tensors of one checkpoint to those of another: which box of which source fills which box of a target.

A move covers what formats differ in: names, transposition, concatenation, splits, fused and stacked tensors, slices and
padding. A target's dtype may differ from its sources'; floating-point values are then rounded to the nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.foreign.listing import ForeignTensor, TensorKey
from holdfast_formats.region import Box, Shape, check_box, first_overlap, intersect, whole
from holdfast_formats.tensors import TensorSpec


class BoxMove(NamedTuple):
    """`box` of the source goes to the box `target`. The target's dimension d is the source's dimension `axes[d]`; None is
    a dimension of one that the source lacks. A source dimension that no axis names has one element in `box`.
    """

    source: TensorKey
    box: Box
    target: Box
    axes: tuple[int | None, ...]


class MappedTensor(NamedTuple):
    """A tensor that is made of others. Elements that no move fills are zeros, and only allowed with `padded`."""

    spec: TensorSpec
    moves: tuple[BoxMove, ...]
    padded: bool = False

    @property
    def key(self) -> TensorKey:
        return TensorKey(self.spec.group, self.spec.name)


def same(tensor: ForeignTensor, key: TensorKey | None = None, dtype: str | None = None) -> MappedTensor:
    """The tensor as it is, under another key or in another dtype perhaps."""
    return permuted(tensor, tuple(range(len(tensor.spec.shape))), key, dtype)


def permuted(
    tensor: ForeignTensor, axes: tuple[int, ...], key: TensorKey | None = None, dtype: str | None = None
) -> MappedTensor:
    """The tensor with its dimensions in the order of `axes`, as `numpy.transpose` takes them."""
    spec = tensor.spec
    group, name = key or tensor.key
    shape = tuple(spec.shape[axis] for axis in axes)
    made = TensorSpec(group, name, dtype or spec.dtype, shape)
    return MappedTensor(made, (BoxMove(tensor.key, whole(spec.shape), whole(shape), axes),))


def check(mapped: MappedTensor, sources: Mapping[TensorKey, TensorSpec]) -> None:
    """`StateMismatch`, by name, unless the moves fill the tensor exactly once, from boxes that the sources have."""
    name, shape = mapped.spec.name, mapped.spec.shape
    for move in mapped.moves:
        if move.source not in sources:
            raise StateMismatch(f"tensor {name!r} is made of {move.source.name!r}, which is not there", tensor=name)
        check_box(move.box, sources[move.source].shape, move.source.name)
        check_box(move.target, shape, name)
        named = [axis for axis in move.axes if axis is not None]
        left = set(range(len(move.box.shape))) - set(named)
        fits = len(named) == len(set(named)) and len(move.axes) == len(shape) and all(move.box.shape[d] == 1 for d in left)
        if not fits or _turned(move.box.shape, move.axes) != move.target.shape:
            raise StateMismatch(
                f"{list(move.box.shape)} of {move.source.name!r} does not fill {list(move.target.shape)} of {name!r}",
                tensor=name,
            )
    if first_overlap([move.target for move in mapped.moves]) is not None:
        raise StateMismatch(f"a part of tensor {name!r} would be written twice", tensor=name)
    missing = whole(shape).volume - sum(move.target.volume for move in mapped.moves)
    if missing and not mapped.padded:
        raise StateMismatch(f"{missing} elements of tensor {name!r} would not be written", tensor=name)


def narrowed(move: BoxMove, box: Box) -> BoxMove | None:
    """The share of a move that fills `box` of the target; None if it fills nothing of it."""
    common = intersect(move.target, box)
    if common is None:
        return None
    offset, shape = list(move.box.offset), list(move.box.shape)
    for d, axis in enumerate(move.axes):
        if axis is not None:
            offset[axis] += common.offset[d] - move.target.offset[d]
            shape[axis] = common.shape[d]
    return BoxMove(move.source, Box(tuple(offset), tuple(shape)), common, move.axes)


def _turned(shape: Shape, axes: tuple[int | None, ...]) -> Shape:
    return tuple(1 if axis is None else shape[axis] for axis in axes)

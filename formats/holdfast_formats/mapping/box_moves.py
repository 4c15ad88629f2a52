"""Maps tensors of one checkpoint to those of another: which box of which source fills which box of a target.

A move covers the differences of formats: names, transposition, concatenation, splits, fused and stacked tensors, slices and
padding, and interleaved rows. A target's dtype may differ from its sources'; floating-point values are then rounded to the
nearest, ties to even.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.region import Box, Shape, check_box, first_overlap, intersect, whole
from holdfast_formats.tensors import TensorSpec


class BoxMove(NamedTuple):
    """`box` of the source goes to the box `target`. The target's dimension d is the source's dimension `axes[d]`; None is a
    dimension of size one that the source lacks. A source dimension that no axis names has one element in `box`.

    `step` and `target_step` are the distances between the elements of a box in each dimension; empty, as usual, means all 1.
    """

    source: TensorKey
    box: Box
    target: Box
    axes: tuple[int | None, ...]
    step: Shape = ()
    target_step: Shape = ()

    @property
    def stepped(self) -> bool:
        return bool(self.step or self.target_step)

    @property
    def turns(self) -> bool:
        """Whether the target has the source's dimensions in another order."""
        axes = [axis for axis in self.axes if axis is not None]
        return axes != sorted(axes)


class MappedTensor(NamedTuple):
    """A tensor that is made of others. Unfilled elements are zeros, and only allowed with `padded`."""

    spec: TensorSpec
    moves: tuple[BoxMove, ...]
    padded: bool = False

    @property
    def key(self) -> TensorKey:
        return TensorKey(self.spec.group, self.spec.name)


def same(tensor: ForeignTensor, key: TensorKey | None = None, dtype: str | None = None) -> MappedTensor:
    """The unchanged tensor, with an optional other key or dtype."""
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
    """`StateMismatch` unless the moves fill the tensor exactly once, from boxes that the sources have."""
    name, shape = mapped.spec.name, mapped.spec.shape
    for move in mapped.moves:
        if move.source not in sources:
            raise StateMismatch(f"tensor {name!r} is made of {move.source.name!r}, which is missing", tensor=name)
        check_box(_spanned(move.box, move.step), sources[move.source].shape, move.source.name)
        check_box(_spanned(move.target, move.target_step), shape, name)
        named = [axis for axis in move.axes if axis is not None]
        left = set(range(len(move.box.shape))) - set(named)
        fits = len(named) == len(set(named)) and len(move.axes) == len(shape) and all(move.box.shape[d] == 1 for d in left)
        if not fits or _turned(move.box.shape, move.axes) != move.target.shape:
            raise StateMismatch(
                f"{list(move.box.shape)} of {move.source.name!r} does not fill {list(move.target.shape)} of {name!r}",
                tensor=name,
            )
    if first_overlap(_plain_targets(mapped.moves)) is not None:
        raise StateMismatch(f"a part of tensor {name!r} would be written twice", tensor=name)
    missing = whole(shape).volume - sum(move.target.volume for move in mapped.moves)
    if missing and not mapped.padded:
        raise StateMismatch(f"{missing} elements of tensor {name!r} would not be written", tensor=name)


def narrowed(move: BoxMove, box: Box) -> BoxMove | None:
    """The share of a move that fills `box` of the target, if any."""
    if move.stepped:
        return _narrowed_steps(move, box)
    common = intersect(move.target, box)
    if common is None:
        return None
    offset, shape = list(move.box.offset), list(move.box.shape)
    for d, axis in enumerate(move.axes):
        if axis is not None:
            offset[axis] += common.offset[d] - move.target.offset[d]
            shape[axis] = common.shape[d]
    return BoxMove(move.source, Box(tuple(offset), tuple(shape)), common, move.axes)


def drawn(move: BoxMove, box: Box) -> BoxMove | None:
    """The share of a move that reads `box` of the source, if any."""
    axes = tuple(move.axes.index(d) if d in move.axes else None for d in range(len(move.box.shape)))
    back = narrowed(BoxMove(move.source, move.target, move.box, axes, move.target_step, move.step), box)
    return None if back is None else move._replace(box=back.target, target=back.box)


def _turned(shape: Shape, axes: tuple[int | None, ...]) -> Shape:
    return tuple(1 if axis is None else shape[axis] for axis in axes)


def _narrowed_steps(move: BoxMove, box: Box) -> BoxMove | None:
    target_steps = move.target_step or (1,) * len(move.target.shape)
    steps = move.step or (1,) * len(move.box.shape)
    offset, shape = list(move.box.offset), list(move.box.shape)
    begin, length = list(move.target.offset), list(move.target.shape)
    for d, (axis, step) in enumerate(zip(move.axes, target_steps, strict=True)):
        low = max(-((begin[d] - box.offset[d]) // step), 0)
        high = min(-((begin[d] - box.offset[d] - box.shape[d]) // step), length[d])
        if high <= low:
            return None
        begin[d] += low * step
        length[d] = high - low
        if axis is not None:
            offset[axis] += low * steps[axis]
            shape[axis] = high - low
    return move._replace(box=Box(tuple(offset), tuple(shape)), target=Box(tuple(begin), tuple(length)))


def _spanned(box: Box, steps: Shape) -> Box:
    """The smallest box without steps that contains one with steps."""
    if not steps or 0 in box.shape:
        return box
    return Box(box.offset, tuple((n - 1) * step + 1 for n, step in zip(box.shape, steps, strict=True)))


def _plain_targets(moves: Sequence[BoxMove]) -> list[Box]:
    """Boxes that overlap if and only if the targets do.

    If all targets have the same steps, a dimension of step s becomes two, of an element's place ÷ s and of the rest.
    Otherwise each stepped dimension is cut into its elements.
    """
    if not any(move.target_step for move in moves):
        return [move.target for move in moves]
    if len({move.target_step for move in moves}) == 1:
        sides = [list(zip(move.target.offset, move.target.shape, move.target_step, strict=True)) for move in moves]
        return [
            Box(
                tuple(n for o, _, step in one for n in (o // step, o % step)),
                tuple(n for _, count, step in one for n in (count, min(count, 1))),
            )
            for one in sides
        ]
    boxes = []
    for move in moves:
        steps = move.target_step or (1,) * len(move.target.shape)
        corners = product(*(range(n) if step > 1 else (0,) for n, step in zip(move.target.shape, steps, strict=True)))
        shape = tuple(1 if step > 1 else n for n, step in zip(move.target.shape, steps, strict=True))
        for index in corners:
            corner = (o + i * step for o, i, step in zip(move.target.offset, index, steps, strict=True))
            boxes.append(Box(tuple(corner), shape))
    return boxes

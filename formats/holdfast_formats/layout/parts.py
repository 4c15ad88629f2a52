"""A rank's local tensors in a layout, each made of parts of other tensors.

A part maps a box of another tensor to places in a local one: a first element and a stride for each dimension of the
box. This form covers a shard, a fused tensor, a stack of experts and a flat range of any of them. Uncovered elements
are padding: zeros in memory, and not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, Shape, intersect, whole


class Part(NamedTuple):
    """Element `box.offset + i` of `tensor` is element `start + Σ i·strides` of the local tensor, counted row-major.

    Of two dimensions, the longer stride is longer than all shorter ones together. In a part that is not turned, strides
    become shorter from dimension to dimension, as in a row-major tensor: positions follow the box's order.
    """

    tensor: str
    box: Box
    start: int
    strides: Shape

    @property
    def stop(self) -> int:
        return self.start + sum((n - 1) * stride for n, stride in zip(self.box.shape, self.strides, strict=True)) + 1

    @property
    def turned(self) -> bool:
        """Whether positions follow another order than the box's: dimensions are transposed."""
        steps = [stride for n, stride in zip(self.box.shape, self.strides, strict=True) if n > 1]
        return steps != sorted(steps, reverse=True)


class LocalTensor(NamedTuple):
    """A tensor as a rank holds it. Its parts do not overlap, except for a scalar shared by several."""

    name: str
    dtype: str
    shape: Shape
    parts: tuple[Part, ...]

    @property
    def volume(self) -> int:
        return prod(self.shape)

    @property
    def padding(self) -> int:
        return max(self.volume - sum(part.box.volume for part in self.parts), 0)


class Fused(NamedTuple):
    """A stored tensor of `shape` that is made of others: they are read out of it, and written into it."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]


def strides(shape: Sequence[int]) -> Shape:
    """The distance of one step along each dimension of a row-major tensor, in elements."""
    return tuple(accumulate(reversed((*shape[1:], 1)), lambda a, b: a * b))[::-1] if shape else ()


def of_box(name: str, dtype: str, tensor: str, box: Box) -> LocalTensor:
    """A box of a tensor as a tensor of its own."""
    parts = (Part(tensor, box, 0, strides(box.shape)),) if box.volume else ()
    return LocalTensor(name, dtype, box.shape, parts)


def narrow(part: Part, box: Box) -> Part | None:
    """The part's share of `box`, which is counted in the part's own tensor; None if they do not overlap."""
    common = intersect(part.box, box)
    if common is None:
        return None
    steps = (o - p for o, p in zip(common.offset, part.box.offset, strict=True))
    shift = sum(step * stride for step, stride in zip(steps, part.strides, strict=True))
    return Part(part.tensor, common, part.start + shift, part.strides)


def cut(part: Part, start: int, stop: int) -> list[Part]:
    """The part's share of positions [start, stop) of its local tensor, with positions counted from `start`."""
    low, high = part.start, part.stop
    if start <= low and high <= stop:
        return [part._replace(start=low - start)]
    if high <= start or stop <= low:
        return []
    long = [d for d, n in enumerate(part.box.shape) if n > 1]  # a part of one element is in or out
    outer = max(long, key=lambda d: part.strides[d])
    stride, n = part.strides[outer], part.box.shape[outer]
    span = high - low - (n - 1) * stride  # the distance of one step of the outermost dimension
    # Steps from `whole_from` to `whole_to` are inside as they are.
    whole_from = max(-(-(start - low) // stride), 0)
    whole_to = min((stop - low - span) // stride + 1, n)
    first = max((start - low - span) // stride + 1, 0)
    last = min(-(-(stop - low) // stride), n)
    parts: list[Part] = []
    for step in range(first, min(whole_from, last)):
        parts += cut(_steps(part, outer, step, step + 1), start, stop)
    if whole_from < whole_to:
        parts += cut(_steps(part, outer, whole_from, whole_to), start, stop)
    for step in range(max(whole_to, whole_from, first), last):
        parts += cut(_steps(part, outer, step, step + 1), start, stop)
    return parts


def _steps(part: Part, dimension: int, first: int, last: int) -> Part:
    offset, shape = list(part.box.offset), list(part.box.shape)
    offset[dimension] += first
    shape[dimension] = last - first
    return Part(part.tensor, Box(tuple(offset), tuple(shape)), part.start + first * part.strides[dimension], part.strides)


def flat(local: LocalTensor, start: int, stop: int) -> LocalTensor:
    """Elements [start, stop) of a local tensor, in one dimension."""
    parts = [piece for part in local.parts for piece in cut(part, start, stop)]
    return LocalTensor(local.name, local.dtype, (stop - start,), tuple(parts))


def rows(local: LocalTensor, first: int, last: int) -> LocalTensor:
    """Rows [first, last) of a local tensor: a cut along dimension 0."""
    one = local.parts[0] if len(local.parts) == 1 else None
    if one is not None and one.box.shape == local.shape and not one.turned:  # the part is the whole tensor, row-major
        tensor, box, _, steps = local.parts[0]
        shape = (last - first, *local.shape[1:])
        part = Part(tensor, Box((box.offset[0] + first, *box.offset[1:]), shape), 0, steps)
        return LocalTensor(local.name, local.dtype, shape, (part,) if first < last else ())
    row = prod(local.shape[1:])
    return flat(local, first * row, last * row)._replace(shape=(last - first, *local.shape[1:]))


def fuse(name: str, dtype: str, pieces: Sequence[tuple[str, Box]], dimension: int, groups: int) -> LocalTensor:
    """Fuse boxes of several tensors into one tensor, along `dimension`.

    It has the first of `groups` equal parts of each box, then the second part of each, and so on. One group means one box
    after the other. Raises `StateMismatch` if the groups do not divide a box, or if boxes differ in another dimension.
    """
    lengths = []
    first = pieces[0][1].shape
    for tensor, box in pieces:
        if box.shape[:dimension] != first[:dimension] or box.shape[dimension + 1 :] != first[dimension + 1 :]:
            raise StateMismatch(
                f"{name!r}: {list(box.shape)} of {tensor!r} and {list(first)} of {pieces[0][0]!r} cannot be "
                f"concatenated along dimension {dimension}",
                hint="the parts of a fused tensor must be sharded in the same way",
            )
        if box.shape[dimension] % groups:
            raise StateMismatch(
                f"{name!r}: {box.shape[dimension]} of {tensor!r} in dimension {dimension} cannot be split into "
                f"{groups} equal groups",
                hint="choose a tp that divides the heads, or leave the tensor unfused: qkv=split or gate_up=split",
            )
        lengths.append(box.shape[dimension] // groups)
    shape = (*first[:dimension], sum(lengths) * groups, *first[dimension + 1 :])
    steps = strides(shape)
    parts: list[Part] = []
    at = 0
    for group in range(groups):
        for (tensor, box), length in zip(pieces, lengths, strict=True):
            place = Part(tensor, box, 0, steps)
            if length and box.volume:
                parts.append(
                    _steps(place, dimension, group * length, (group + 1) * length)._replace(start=at * steps[dimension])
                )
            at += length
    return LocalTensor(name, dtype, shape, tuple(parts))


def stack(name: str, layers: Sequence[LocalTensor]) -> LocalTensor:
    """Tensors of one shape as one tensor, along a new dimension 0."""
    shape = layers[0].shape
    if any(layer.shape != shape or layer.dtype != layers[0].dtype for layer in layers):
        raise StateMismatch(
            f"tensor {name!r} cannot be stacked: {sorted({(t.dtype, t.shape) for t in layers})}",
            hint="leave the experts unstacked: experts=split",
        )
    volume = prod(shape)
    parts = [part._replace(start=part.start + i * volume) for i, layer in enumerate(layers) for part in layer.parts]
    return LocalTensor(name, layers[0].dtype, (len(layers), *shape), tuple(parts))


def resolve(local: LocalTensor, sources: Mapping[str, Sequence[Fused]]) -> LocalTensor:
    """The same local tensor with parts of stored tensors, if its own parts are of tensors inside others.

    `sources` names, for a tensor, the stored ones that contain it; other tensors are stored themselves. Raises
    `StateMismatch` with the tensor of which a part is not stored.
    """
    parts: list[Part] = []
    for part in local.parts:
        held = sources.get(part.tensor)
        if held is None:
            parts.append(part)
            continue
        inner_parts = [inner for source in held for inner in _inside(part, source)]
        if sum(inner.box.volume for inner in inner_parts) != part.box.volume:
            raise StateMismatch(
                f"tensor {local.name!r} needs {list(part.box.offset)}+{list(part.box.shape)} of {part.tensor!r}, "
                f"of which {', '.join(repr(source.name) for source in held)} do not hold everything",
                hint="the rules do not match this checkpoint: choose another table with rules=",
            )
        parts += inner_parts
    return local._replace(parts=tuple(dict.fromkeys(parts)))


def _inside(part: Part, source: Fused) -> Iterable[Part]:
    for piece in source.parts:
        wanted = narrow(part, piece.box) if piece.tensor == part.tensor else None
        if wanted is None:
            continue
        there = narrow(piece, wanted.box)
        assert there is not None  # the same common box
        place, dimensions = _place(there, source.shape)
        steps = [0] * len(source.shape)
        for own, outer in enumerate(dimensions):
            if outer is not None:
                steps[outer] = wanted.strides[own]
        yield Part(source.name, place, wanted.start, tuple(steps))


def _place(part: Part, shape: Shape) -> tuple[Box, list[int | None]]:
    """The box of a row-major tensor of `shape` that contains the part, and the dimension that each of the part's became."""
    steps = strides(shape)
    left, offset = part.start, []
    for step in steps:
        offset.append(left // step)
        left %= step
    lengths = [1] * len(shape)
    dimensions: list[int | None] = []
    for n, stride in zip(part.box.shape, part.strides, strict=True):
        outer = next((d for d in range(len(shape)) if steps[d] == stride and shape[d] > 1), None) if n > 1 else None
        if n > 1 and outer is None:
            raise StateMismatch(
                f"a part of {part.tensor!r} with strides {list(part.strides)} is not a box of {list(shape)}",
                hint="leave the tensor unfused in the layout: qkv=split, gate_up=split or experts=split",
            )
        if outer is not None:
            lengths[outer] = n
        dimensions.append(outer)
    return Box(tuple(offset), tuple(lengths)), dimensions


def view(memory: NDArray[Any], part: Part) -> NDArray[Any]:
    """The part's place in the memory of its local tensor, as an array of its box's shape; `memory` is 1-d and contiguous."""
    steps = tuple(stride * memory.itemsize for stride in part.strides)
    return np.lib.stride_tricks.as_strided(memory[part.start :], part.box.shape, steps)


def full(name: str, dtype: str, shape: Shape) -> LocalTensor:
    """A tensor that a rank holds completely."""
    return of_box(name, dtype, name, whole(shape))

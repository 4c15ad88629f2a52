"""Geometry: boxes of row-major tensors, their byte runs, and exact tilings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from . import dtypes
from .errors import StateMismatch

Shape = tuple[int, ...]


class Box(NamedTuple):
    """An axis-aligned part of a tensor: its first corner and its size, in elements, one number per dimension."""

    offset: Shape
    shape: Shape

    @property
    def volume(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> Shape:
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that cuts this box out of its tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def within(self, outer: Box) -> Box:
        """The same box with `outer`'s corner as the origin."""
        return Box(tuple(o - p for o, p in zip(self.offset, outer.offset, strict=True)), self.shape)

    def place(self, inner: Box) -> Box:
        """The reverse of `within`: a box relative to this one's corner, relative to the tensor's origin instead."""
        return Box(tuple(o + p for o, p in zip(inner.offset, self.offset, strict=True)), inner.shape)


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def check_box(box: Box, shape: Shape, name: str = "") -> None:
    """Refuse a box that is not inside a tensor of `shape`, with the tensor's name."""
    fits = len(box.offset) == len(box.shape) == len(shape)
    for o, n, size in zip(box.offset, box.shape, shape, strict=False):  # takes half the time of `all`
        fits = fits and o >= 0 and n >= 0 and o + n <= size
    if not fits:
        raise StateMismatch(f"tensor {name!r}: box {list(box.offset)}+{list(box.shape)} lies outside shape {list(shape)}")


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None when it is empty (two 0-d boxes always meet)."""
    offset = tuple(map(max, a.offset, b.offset))
    stop = tuple(map(min, a.stop, b.stop))
    if any(s <= o for o, s in zip(offset, stop, strict=True)):
        return None
    return Box(offset, tuple(s - o for o, s in zip(offset, stop, strict=True)))


def byte_runs(box: Box, shape: Shape, itemsize: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start in the tensor, start in the box, length) for each contiguous run, both row-major, in bytes."""
    if 0 in box.shape:
        return
    cut = len(shape)  # dimensions from `cut` on are whole
    while cut > 0 and box.shape[cut - 1] == shape[cut - 1]:
        cut -= 1
    cut = max(cut - 1, 0)  # the last cut dimension still yields adjacent rows
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    row = strides[cut] if shape else 1
    length = (box.shape[cut] if shape else 1) * row * itemsize
    first = (box.offset[cut] if shape else 0) * row
    outer = (range(o, o + n) for o, n in zip(box.offset[:cut], box.shape[:cut], strict=True))
    for position, index in enumerate(product(*outer)):
        start = first + sum(i * stride for i, stride in zip(index, strides[:cut], strict=True))
        yield start * itemsize, position * length, length


def byte_span(box: Box, shape: Shape, itemsize: int) -> tuple[int, int]:
    """The smallest byte interval [start, stop) of the tensor that holds the whole box; (0, 0) when the box is empty."""
    first = last = 0
    for offset, length, size in zip(box.offset, box.shape, shape, strict=True):
        if not length:
            return 0, 0
        first = first * size + offset
        last = last * size + offset + length - 1
    return first * itemsize, (last + 1) * itemsize


def widest_gap(box: Box, shape: Shape, itemsize: int) -> int:
    """The largest gap in bytes between two neighbouring runs of a box; 0 if the box is one run, or empty."""
    widest, span, stride = 0, itemsize, itemsize  # `span`: from the first byte to the last of one index
    for length, size in zip(reversed(box.shape), reversed(shape), strict=True):
        if not length:
            return 0
        if length > 1:
            widest = max(widest, stride - span)
        span += (length - 1) * stride
        stride *= size
    return widest


def next_inside(box: Box, shape: Shape, flat: int) -> int | None:
    """Flat position of a box's first element at or after position `flat` of a row-major tensor; None after its last."""
    if flat >= prod(shape):
        return None
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    index: list[int] = []
    rest = flat
    for stride in strides:
        at, rest = divmod(rest, stride)
        index.append(at)
    stop = box.stop
    for d, (at, low) in enumerate(zip(index, box.offset, strict=True)):
        if low <= at < stop[d]:
            continue
        kept = d
        if at >= stop[d]:  # on to the next index of a dimension before this one
            while kept and index[kept - 1] + 1 >= stop[kept - 1]:
                kept -= 1
            if not kept:
                return None
            index[kept - 1] += 1
        index[kept:] = box.offset[kept:]
        return sum(i * stride for i, stride in zip(index, strides, strict=True))
    return flat


def union_volume(boxes: Sequence[Box]) -> int:
    """The number of elements that are in at least one of the boxes."""
    if len(boxes) == 1:
        return boxes[0].volume
    solid = [box for box in set(boxes) if box.volume]
    if len(solid) < 2 or first_overlap(solid) is None:
        return sum(box.volume for box in solid)
    edges = sorted({edge for box in solid for edge in (box.offset[0], box.stop[0])})
    total = 0
    for low, high in pairwise(edges):  # between two edges, all boxes have the same extent in dimension 0
        across = [Box(b.offset[1:], b.shape[1:]) for b in solid if b.offset[0] <= low and high <= b.stop[0]]
        total += (high - low) * union_volume(across)
    return total


def flat_boxes(start: int, stop: int, shape: Shape) -> list[Box]:
    """Cut the flat element range [start, stop) of a row-major tensor into boxes, in order: at most 2·ndim − 1 of them."""
    if not 0 <= start <= stop <= prod(shape):
        raise StateMismatch(f"flat range [{start}, {stop}) lies outside a tensor of shape {list(shape)}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last:
        return _under(first, flat_boxes(start - first * row, stop - first * row, shape[1:]))
    boxes: list[Box] = []
    if start % row:
        boxes += _under(first, flat_boxes(start - first * row, row, shape[1:]))
        first += 1
    full = stop // row
    if full > first:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (full - first, *shape[1:])))
    if stop % row:
        boxes += _under(full, flat_boxes(0, stop - full * row, shape[1:]))
    return boxes


def _under(index: int, boxes: Iterable[Box]) -> list[Box]:
    return [Box((index, *box.offset), (1, *box.shape)) for box in boxes]


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None. A sweep along dimension 0 keeps the number of compared pairs small."""
    active: list[Box] = []
    for box in sorted(box for box in boxes if box.volume):
        low = box.offset[0] if box.offset else 0
        active = [other for other in active if not other.offset or other.stop[0] > low]
        for other in active:
            if intersect(box, other) is not None:
                return other, box
        active.append(box)
    return None


class ByteView(NamedTuple):
    """A tensor seen as bytes or as whole elements: the shape and item size for `byte_runs`."""

    shape: Shape
    itemsize: int


def byte_view(dtype: str, shape: Shape, name: str = "") -> ByteView:
    """How to address a tensor of this dtype: elements as they are, sub-byte types as rows of bytes.

    If the rows of a sub-byte tensor do not end at a byte, it is one row of bytes: it can be read whole, but not cut. Raises
    `StateMismatch` by name if not even the whole ends at a byte.
    """
    width = dtypes.bits(dtype)
    if width % 8 == 0:
        return ByteView(shape, width // 8)
    if shape and shape[-1] * width % 8 == 0:
        return ByteView((*shape[:-1], shape[-1] * width // 8), 1)
    return ByteView((dtypes.nbytes(dtype, prod(shape), name),), 1)


def byte_box(dtype: str, box: Box, shape: Shape, name: str = "") -> Box:
    """`box` in the coordinates of `byte_view`; `StateMismatch` by name if it would cut inside a byte."""
    width = dtypes.bits(dtype)
    if width % 8 == 0:
        return box
    view = byte_view(dtype, shape, name)
    if box == whole(shape):
        return whole(view.shape)
    if not box.volume:
        return whole((0,) * len(view.shape))
    begin, length = box.offset[-1] * width, box.shape[-1] * width
    if begin % 8 or length % 8 or len(view.shape) != len(shape) or shape[-1] * width % 8:
        raise StateMismatch(
            f"tensor {name!r}: {dtype} has {width} bits an element and cannot be cut at "
            f"{list(box.offset)}+{list(box.shape)}, which is inside a byte",
            hint="shard another dimension, or shard at a multiple of whole bytes",
        )
    return Box((*box.offset[:-1], begin // 8), (*box.shape[:-1], length // 8))

"""The parts of a tensor in slots, and its bytes assembled from them: by the writer for a file, by a restart for memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.region import Box, ByteView, byte_box, byte_span, byte_view
from holdfast_formats.tensors import TensorSpec
from holdfast_formats.transfer import Direction, element_dtype, move

Bytes = NDArray[np.uint8]


class Holding(NamedTuple):
    """A box's bytes in a slot, and its bytes [start, stop) of the tensor: None if strided. `held_as`: they are elements
    of that dtype, to be rounded.
    """

    flat: Bytes
    span: tuple[int, int] | None
    box: Box  # in byte-view coordinates
    held_as: str = ""


def hold(spec: TensorSpec, box: Box, data: Bytes, held_as: str = "") -> Holding:
    """The holding of a box, given the slot's bytes from the box's first one on; bytes after the box are ignored."""
    view = byte_view(spec.dtype, spec.shape, spec.name)
    inside = byte_box(spec.dtype, box, spec.shape, spec.name)
    width = dtypes.bits(held_as) // 8 if held_as else view.itemsize
    return Holding(data[: inside.volume * width], _span(inside, view), inside, held_as)


def span_of(spec: TensorSpec, box: Box) -> tuple[int, int] | None:
    return _span(byte_box(spec.dtype, box, spec.shape, spec.name), byte_view(spec.dtype, spec.shape, spec.name))


def _span(inside: Box, view: ByteView) -> tuple[int, int] | None:
    span = byte_span(inside, view.shape, view.itemsize)
    return span if span[1] - span[0] == inside.volume * view.itemsize else None


def hold_all(spec: TensorSpec, data: Bytes) -> Holding:
    """The holding of a whole tensor, faster than with `hold`."""
    size = spec.nbytes
    return Holding(data[:size], (0, size), Box((), ()))


def view(held: Sequence[Holding], start: int, stop: int) -> Bytes | None:
    """Bytes [start, stop) of the tensor if they are in one piece; None when they must be gathered."""
    for one in held:
        if one.span is not None and not one.held_as and one.span[0] <= start and stop <= one.span[1]:
            return one.flat[start - one.span[0] : stop - one.span[0]]
    return None


def gather(spec: TensorSpec, held: Sequence[Holding], offset: int, target: Bytes) -> int:
    """Fill `target` with the tensor's bytes from `offset` on; return how many there were: all, if the boxes tile it."""
    stop = offset + target.nbytes
    copied = 0
    for one in held:
        if one.span is None or one.held_as:
            return _gather_elements(spec, held, offset, target)
        low, high = max(one.span[0], offset), min(one.span[1], stop)
        if low < high:
            target[low - offset : high - offset] = one.flat[low - one.span[0] : high - one.span[0]]
            copied += high - low
    return copied


def _gather_elements(spec: TensorSpec, held: Sequence[Holding], offset: int, target: Bytes) -> int:
    seen = byte_view(spec.dtype, spec.shape, spec.name)
    before = offset % seen.itemsize  # the ends of the requested range may be inside an element
    after = -(offset + target.nbytes) % seen.itemsize
    padded: Bytes = np.empty(before + target.nbytes + after, np.uint8) if before or after else target
    moved = 0
    for one in held:
        # NumPy rounds floats to nearest even where it assigns them to shorter ones; else widths alone matter.
        kind, into = (one.held_as, spec.dtype) if one.held_as else ("", "")
        extent: NDArray[Any] = padded.view(_numpy(into, seen.itemsize))
        elements = one.flat.view(_numpy(kind, seen.itemsize)).reshape(one.box.shape)
        with np.errstate(all="ignore"):  # what becomes infinite is: so it does in a trainer
            moved += move(Direction.GATHER, extent, offset // seen.itemsize, elements, one.box, seen.shape)
    if padded is not target:
        target[:] = padded[before : before + target.nbytes]
    return target.nbytes if moved * seen.itemsize == padded.nbytes else moved * seen.itemsize


def _numpy(dtype: str, itemsize: int) -> np.dtype[Any]:
    return dtypes.to_numpy(dtype) if dtype else element_dtype(itemsize)

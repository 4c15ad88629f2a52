"""Reads tensors of a foreign checkpoint, box by box, into the caller's memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from holdfast_formats import dtypes, transfer
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping.box_moves import MappedTensor, narrowed
from holdfast_formats.mapping.listing import Decoder, ForeignPiece, ForeignTensor, TensorKey
from holdfast_formats.region import Box, Shape, flat_boxes, intersect, whole

SPAN_BYTES_MAX = 2**24  # read at once: of a piece with non-contiguous elements, including gaps
SPARSE = 4  # gaps are read too, unless they are so many times as long as what is wanted


def elements(
    files: Files, tensors: Mapping[TensorKey, ForeignTensor], mapped: MappedTensor, start: int, stop: int
) -> NDArray[Any]:
    """Elements [start, stop) of a mapped tensor, row-major, flat, in its dtype.

    Raises `CorruptManifest` for a file that became shorter, and errors of `files`.
    """
    boxes = flat_boxes(start, stop, mapped.spec.shape)
    decoder = _decoder_of_all(tensors, mapped) if len(boxes) == 1 else None
    if decoder is not None:  # its array need not be copied
        values = decoder.decode(boxes[0], partial(fetched, files))
        if values.dtype == dtypes.to_numpy(mapped.spec.dtype):
            return np.ascontiguousarray(values).reshape(-1)
        converted = np.empty(boxes[0].shape, dtypes.to_numpy(mapped.spec.dtype))
        assign(converted, values, mapped.spec.name)
        return converted.reshape(-1)
    arrangement = np.zeros(stop - start, dtypes.to_numpy(mapped.spec.dtype))
    at = 0
    for box in boxes:
        target = arrangement[at : at + box.volume].reshape(box.shape)
        at += box.volume
        for move in mapped.moves:
            part = narrowed(move, box)
            if part is None:
                continue
            place = _part(target, part.target.within(box), part.target_step)
            into = _as_source(place, part.axes, len(part.box.shape))
            if part.step:
                _fill_steps(files, tensors[part.source], part.box, part.step, into)
            else:
                fill(files, tensors[part.source], part.box, into)
    return arrangement


def fetched(files: Files, tensor: ForeignTensor, box: Box | None = None, into: NDArray[Any] | None = None) -> NDArray[Any]:
    """A box of a tensor, or all of it, in its dtype: `into`, if it is given, or a new array."""
    wanted = whole(tensor.spec.shape) if box is None else box
    values = np.empty(wanted.shape, dtypes.to_numpy(tensor.spec.dtype)) if into is None else into
    fill(files, tensor, wanted, values)
    return values


def _decoder_of_all(tensors: Mapping[TensorKey, ForeignTensor], mapped: MappedTensor) -> Decoder | None:
    """The decoder of a tensor used as it is; None if it is mapped in any way."""
    if len(mapped.moves) != 1:
        return None
    move, source = mapped.moves[0], tensors[mapped.moves[0].source]
    everything = whole(mapped.spec.shape)
    straight = move.axes == tuple(range(len(source.spec.shape))) and move.box == move.target == everything
    return source.decoder if straight and not move.stepped and source.spec.shape == mapped.spec.shape else None


def fill(files: Files, tensor: ForeignTensor, box: Box, into: NDArray[Any]) -> None:
    """Write a box of a tensor into an array of its shape, of any strides and dtype; errors as of `elements`."""
    if tensor.decoder is not None:
        assign(into, tensor.decoder.decode(box, partial(fetched, files)), tensor.spec.name)
        return
    dtype, filled = dtypes.to_numpy(tensor.spec.dtype), 0
    for piece in tensor.pieces:
        common = intersect(piece.box, box)
        if common is not None and common.volume:
            filled += common.volume
            _read(files, piece, dtype, common, _part(into, common.within(box)), tensor.spec.name)
    if filled != box.volume:
        raise StateMismatch(
            f"{box.volume - filled} elements of tensor {tensor.spec.name!r} are in no file",
            hint="complete the source, or drop the tensor with a program's NAME -> _",
        )


def _fill_steps(files: Files, tensor: ForeignTensor, box: Box, step: Shape, into: NDArray[Any]) -> None:
    """`fill` with a step: reads the elements between, too, in parts of about `SPAN_BYTES_MAX`."""
    outer = next((d for d, (n, by) in enumerate(zip(box.shape, step, strict=True)) if n > 1 and by > 1), 0)
    spanned = [(n - 1) * by + 1 for n, by in zip(box.shape, step, strict=True)]
    row = prod(spanned[:outer]) * prod(spanned[outer + 1 :]) * step[outer] * dtypes.to_numpy(tensor.spec.dtype).itemsize
    rows = max(SPAN_BYTES_MAX // max(row, 1), 1)
    for begin in range(0, box.shape[outer], rows):
        count = min(rows, box.shape[outer] - begin)
        offset, shape = list(box.offset), list(spanned)
        offset[outer] += begin * step[outer]
        shape[outer] = (count - 1) * step[outer] + 1
        held = fetched(files, tensor, Box(tuple(offset), tuple(shape)))
        place = into[(slice(None),) * outer + (slice(begin, begin + count),)]
        assign(place, held[tuple(slice(None, None, by) for by in step)], tensor.spec.name)


def assign(into: NDArray[Any], values: NDArray[Any], name: str) -> None:
    """Copy values, converted to the other dtype; `StateMismatch` if that changes the kind of number, or a number overflows
    to infinity or NaN.
    """
    if into.dtype != values.dtype and (_whole_number(into.dtype) or _whole_number(values.dtype)):
        raise StateMismatch(
            f"tensor {name!r} cannot be converted from {values.dtype} to {into.dtype}",
            hint="keep whole numbers as they are: leave the dtype out",
            tensor=name,
        )
    if into.dtype == values.dtype:
        transfer.copy(into, values)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(into.dtype)
        if _largest(into.dtype) < _largest(values.dtype):
            lost = np.isfinite(values) & ~np.isfinite(converted)
            if lost.any():
                raise StateMismatch(
                    f"tensor {name!r} has {float(values[lost][0]):g}, which {into.dtype} cannot hold",
                    hint="convert to a dtype with more range, such as bfloat16",
                    tensor=name,
                )
    transfer.copy(into, converted)


def _largest(dtype: np.dtype[Any]) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _whole_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biu"


def _part(array: NDArray[Any], box: Box, step: Shape = ()) -> NDArray[Any]:
    """A box of an array as a view, also without dimensions; its elements may be `step` apart."""
    index: tuple[Any, ...] = (*box.slices, ...)
    if step:
        sides = zip(box.offset, box.shape, step, strict=True)
        index = (*(slice(o, o + (n - 1) * by + 1, by) for o, n, by in sides), ...)
    part: NDArray[Any] = array[index]
    return part


def _as_source(place: NDArray[Any], axes: tuple[int | None, ...], dimensions: int) -> NDArray[Any]:
    """A view of a target's box with the source's order of dimensions.

    `...` ends each index, because an index without dimensions would give a copy of the element.
    """
    known = [axis for axis in axes if axis is not None]
    kept = place[(*(0 if axis is None else slice(None) for axis in axes), ...)]
    turned = kept.transpose([known.index(axis) for axis in sorted(known)])
    return turned[(*(slice(None) if d in known else None for d in range(dimensions)), ...)]


def _read(files: Files, piece: ForeignPiece, dtype: np.dtype[Any], box: Box, into: NDArray[Any], name: str) -> None:
    within = box.within(piece.box).offset
    first = piece.start + sum(i * step for i, step in zip(within, piece.strides, strict=True)) * dtype.itemsize
    direct = into.dtype == dtype and into.flags.c_contiguous and _row_major(piece.strides, box.shape)
    if direct:
        _whole(files, piece.file, first, into.reshape(-1).view(np.uint8))
        return
    for start, part in _spans(box.shape, piece.strides, dtype.itemsize):
        shape = part.shape
        begin = first + sum(i * step for i, step in zip(start, piece.strides, strict=True)) * dtype.itemsize
        reach = sum((n - 1) * step for n, step in zip(shape, piece.strides, strict=True)) + 1
        buffer = np.empty(reach * dtype.itemsize, np.uint8)
        _whole(files, piece.file, begin, buffer)
        steps = [step * dtype.itemsize for step in piece.strides]
        width = f"u{dtype.itemsize}"  # numpy makes no strided view of float8_e5m2
        bits = as_strided(buffer.view(width), shape, steps, writeable=False)
        assign(_part(into, part), bits.view(dtype), name)


def _spans(shape: tuple[int, ...], steps: tuple[int, ...], width: int) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Boxes that tile `shape`, with their first corners; each is read at once."""
    waiting = [whole(shape)]
    while waiting:
        box = waiting.pop()
        reach = (sum((n - 1) * step for n, step in zip(box.shape, steps, strict=True)) + 1) * width
        wanted = box.volume * width
        long = [d for d, n in enumerate(box.shape) if n > 1]
        if not long or (reach <= SPAN_BYTES_MAX and (reach <= SPARSE * wanted or reach <= 2**16)):
            yield box.offset, box
            continue
        outer = max(long, key=lambda d: (steps[d], box.shape[d]))
        half = box.shape[outer] // 2
        for begin, length in ((half, box.shape[outer] - half), (0, half)):
            offset, size = list(box.offset), list(box.shape)
            offset[outer] += begin
            size[outer] = length
            waiting.append(Box(tuple(offset), tuple(size)))


def _row_major(steps: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(n == 1 or step == prod(shape[d + 1 :]) for d, (n, step) in enumerate(zip(shape, steps, strict=True)))


def _whole(files: Files, file: str, start: int, buffer: NDArray[np.uint8]) -> None:
    if files.read_into(file, start, buffer) != buffer.nbytes:
        raise CorruptManifest(
            f"{file} was truncated while being read", hint="import it again when no process is writing it", file=file
        )

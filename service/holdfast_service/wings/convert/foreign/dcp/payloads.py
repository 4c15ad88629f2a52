"""The place of each chunk's elements in its payload: in a zip of `torch.save`, or in a safetensors part of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.errors import StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping.listing import ForeignPiece
from holdfast_formats.region import Box, Shape, flat_boxes, whole
from holdfast_service.wings.convert.foreign import pickles
from holdfast_service.wings.convert.foreign.dcp.metadata import SavedChunk, SavedState, SavedTensor
from holdfast_service.wings.convert.foreign.pickles import PickledArray
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray, read_safetensors

SHARDING = "DCP_SHARDING_INFO"  # in the header of safetensors that DCP wrote: where each tensor's first element belongs
_ZIP = b"PK"


class SafetensorsPart(NamedTuple):
    """The safetensors from a byte of a file to its end: arrays by name, with the place that DCP states for each."""

    arrays: Mapping[str, StoredArray]
    offsets: Mapping[str, Shape] | None


class Payloads:
    """Finds the pieces of a directory's tensors. Reads each safetensors part once."""

    def __init__(self, files: Files, saved: SavedState) -> None:
        self._files, self._saved = files, saved
        self._parts: dict[tuple[str, int], SafetensorsPart] = {}

    def pieces(self, tensor: SavedTensor) -> tuple[ForeignPiece, ...]:
        """All pieces of a tensor, of its true shape. `StateMismatch` if a payload has another one."""
        found = [self._piece(tensor, chunk) for chunk in tensor.chunks]
        shape = self._saved.flattened.get(tensor.fqn)
        return tuple(found) if shape is None else tuple(part for piece in found for part in _cells(tensor, piece, shape))

    def shape(self, tensor: SavedTensor) -> Shape:
        return self._saved.flattened.get(tensor.fqn, tensor.shape)

    def _piece(self, tensor: SavedTensor, chunk: SavedChunk) -> ForeignPiece:
        at = chunk.at
        if self._files.read(at.file, at.start, 2) != _ZIP:
            return self._in_safetensors(tensor, chunk)
        array = pickles.read_torch(self._files, at.file, at=(at.start, at.length))
        if not isinstance(array, PickledArray):
            raise _unfit(tensor, chunk, f"found a {pickles.kind_of(array)} instead of a tensor")
        _check(tensor, chunk, array.dtype, array.shape)
        return ForeignPiece(array.file, array.offset, chunk.box, array.strides, array.member)

    def _in_safetensors(self, tensor: SavedTensor, chunk: SavedChunk) -> ForeignPiece:
        at = chunk.at
        key = (at.file, at.start)
        if key not in self._parts:
            self._parts[key] = safetensors_part(self._files, at.file, at.start)
        part = self._parts[key]
        array = part.arrays.get(tensor.fqn)
        if array is None:
            raise _unfit(tensor, chunk, "the safetensors data there has no tensor of this name")
        _check(tensor, chunk, array.dtype, array.shape)
        if part.offsets is not None and part.offsets.get(tensor.fqn) != chunk.box.offset:
            raise _unfit(tensor, chunk, f"the tensor there is the part at {part.offsets.get(tensor.fqn)}")
        return array.piece(whole(array.shape), chunk.box.offset)


def safetensors_part(files: Files, file: str, start: int = 0) -> SafetensorsPart:
    """The safetensors in a file from byte `start` on. `CorruptManifest` if they do not fill it."""
    held = read_safetensors(files, file, start)
    sharding = held.metadata.get(SHARDING)
    return SafetensorsPart(
        {array.key: array for array in held.arrays}, None if sharding is None else _offsets(sharding, file)
    )


def _offsets(text: str, file: str) -> dict[str, Shape]:
    try:
        document: Any = json.loads(text)
        offsets = {name: tuple(about["saved_offsets"]) for name, about in document.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StateMismatch(f"{file} has a {SHARDING} that cannot be read: {error}", file=file) from error
    if not all(type(n) is int and n >= 0 for offset in offsets.values() for n in offset):
        raise StateMismatch(f"{file} has a {SHARDING} with offsets that are not numbers", file=file)
    return offsets


def _check(tensor: SavedTensor, chunk: SavedChunk, dtype: str, shape: Shape) -> None:
    if (dtype, shape) != (tensor.dtype, chunk.box.shape):
        wanted = f"{tensor.dtype}{list(chunk.box.shape)}"
        raise _unfit(tensor, chunk, f"it is {dtype}{list(shape)} there, but {wanted} in .metadata")


def _unfit(tensor: SavedTensor, chunk: SavedChunk, what: str) -> StateMismatch:
    where = f"{chunk.at.file} at {chunk.at.start}+{chunk.at.length}"
    return StateMismatch(f"{tensor.fqn!r}, {where}: {what}", file=chunk.at.file, tensor=tensor.fqn)


def _cells(tensor: SavedTensor, piece: ForeignPiece, shape: Shape) -> list[ForeignPiece]:
    """The pieces of a tensor whose chunks are flat ranges of one cell: Megatron-core describes a grid of equal cells, and
    the elements of a cell as one more dimension.
    """
    grid, cell = tensor.shape[:-1], tensor.shape[-1]
    box = piece.box
    one = all(n == 1 for n in box.shape[:-1]) and len(grid) == len(shape) and all(g > 0 for g in grid)
    inner = tuple(n // g for n, g in zip(shape, grid, strict=True)) if one else ()
    if not one or prod(inner) != cell or any(n % g for n, g in zip(shape, grid, strict=True)):
        raise StateMismatch(
            f"{tensor.fqn!r}: {list(tensor.shape)} is not a grid of cells of {list(shape)}",
            file=piece.file,
            tensor=tensor.fqn,
        )
    corner = tuple(i * n for i, n in zip(box.offset[:-1], inner, strict=True))
    width = piece.strides[-1]
    first = box.offset[-1]
    cells, at = [], 0
    for part in flat_boxes(first, first + box.shape[-1], inner):
        steps = tuple(width * step for step in strides(part.shape))
        place = Box(tuple(c + o for c, o in zip(corner, part.offset, strict=True)), part.shape)
        cells.append((at, place, steps))
        at += part.volume
    size = dtypes.bits(tensor.dtype) // 8
    return [
        ForeignPiece(piece.file, piece.start + at * width * size, place, steps, piece.member) for at, place, steps in cells
    ]

"""Arrays of other programs' files, before they get our names and layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast_formats import dtypes
from holdfast_formats.disk import safetensors
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping.listing import ForeignPiece, ForeignTensor, StoredMember
from holdfast_formats.region import Box, Shape, flat_boxes, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import file_signs

_AGAIN = "copy the file again, or import another step"


class StoredArray(NamedTuple):
    """An array in a file: its key, the dtype of its values, and its elements' places, as in a `ForeignPiece`."""

    file: str
    key: str
    dtype: str
    shape: Shape
    start: int
    strides: Shape
    member: StoredMember | None = None

    def piece(self, inner: Box, at: Sequence[int]) -> ForeignPiece:
        """The box `inner` of this array as a piece of a tensor, where its first corner is `at`."""
        first = sum(i * step for i, step in zip(inner.offset, self.strides, strict=True))
        start = self.start + first * dtypes.bits(self.dtype) // 8
        return ForeignPiece(self.file, start, Box(tuple(at), inner.shape), self.strides, self.member)

    def all(self) -> ForeignPiece:
        return self.piece(whole(self.shape), (0,) * len(self.shape))

    def run(self, first: int, start: int, stop: int, shape: Shape) -> list[ForeignPiece]:
        """Elements from `first` on of this one-dimensional array as the elements [start, stop) of a row-major tensor."""
        if len(self.shape) != 1 or first + stop - start > self.shape[0]:
            raise self.odd(f"it has no {stop - start} elements from element {first} on")
        (step,), width, pieces = self.strides, dtypes.to_numpy(self.dtype).itemsize, []
        for box in flat_boxes(start, stop, shape):
            steps = tuple(step * outer for outer in strides(box.shape))
            pieces.append(ForeignPiece(self.file, self.start + first * step * width, box, steps, self.member))
            first += box.volume
        return pieces

    def odd(self, why: str) -> StateMismatch:
        """The error for an array that does not fit."""
        what = f"{self.file}: {self.key!r} is {self.dtype} of shape {list(self.shape)}: {why}"
        return StateMismatch(what, file=self.file, tensor=self.key)

    def tensor(self, group: str, name: str) -> ForeignTensor:
        return ForeignTensor(TensorSpec(group, name, self.dtype, self.shape), (self.all(),))


class SafetensorsFile(NamedTuple):
    """A file's arrays in their order, and the metadata in its header."""

    arrays: tuple[StoredArray, ...]
    metadata: Mapping[str, str]

    @property
    def format(self) -> str | None:
        """How matrices lie, as libraries state it: `pt`, `np` …"""
        return self.metadata.get("format")


def read_safetensors(files: Files, path: str, start: int = 0, why: str = "", hint: str = _AGAIN) -> SafetensorsFile:
    """The arrays of the safetensors in a file from byte `start` on, to its end; `why` the file is needed.

    `CorruptManifest`, with this hint, for an invalid header, and for a missing file.
    """
    stored = files.size(path)
    if stored is None:
        raise file_signs.absent(files, path, why)
    size, head = stored - start, files.read(path, start, file_signs.HEAD_BYTES)
    file_signs.check_head(path, head)
    try:
        length = safetensors.header_length(head[: safetensors.LENGTH_BYTES], size, path)
        header = safetensors.decode(files.read(path, start, safetensors.LENGTH_BYTES + length), size, path)
    except CorruptManifest as error:
        raise CorruptManifest(error.detail, hint=hint, file=path) from error
    data = start + header.header_bytes
    arrays = [
        StoredArray(path, name, dtype, shape, data + at, strides(shape)) for name, dtype, shape, at, _ in header.tensors
    ]
    return SafetensorsFile(tuple(arrays), header.metadata or {})

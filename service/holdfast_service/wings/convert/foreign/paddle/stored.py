"""Arrays of Paddle's files, before they get our names and layouts."""

from __future__ import annotations

from collections.abc import Sequence
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
        start = self.start + first * dtypes.to_numpy(self.dtype).itemsize
        return ForeignPiece(self.file, start, Box(tuple(at), inner.shape), self.strides, self.member)

    def all(self) -> ForeignPiece:
        return self.piece(whole(self.shape), (0,) * len(self.shape))

    def run(self, first: int, start: int, stop: int, shape: Shape) -> list[ForeignPiece]:
        """Elements from `first` on of this one-dimensional array as the elements [start, stop) of a row-major tensor."""
        if len(self.shape) != 1 or first + stop - start > self.shape[0]:
            raise StateMismatch(
                f"{self.file}: {self.key!r} of shape {list(self.shape)} lacks {stop - start} elements from {first} on",
                file=self.file,
                tensor=self.key,
            )
        (step,), width, pieces = self.strides, dtypes.to_numpy(self.dtype).itemsize, []
        for box in flat_boxes(start, stop, shape):
            steps = tuple(step * outer for outer in strides(box.shape))
            pieces.append(ForeignPiece(self.file, self.start + first * step * width, box, steps, self.member))
            first += box.volume
        return pieces

    def tensor(self, group: str, name: str) -> ForeignTensor:
        return ForeignTensor(TensorSpec(group, name, self.dtype, self.shape), (self.all(),))


class SafetensorsFile(NamedTuple):
    """A file's arrays in their order, and the format in its metadata."""

    arrays: tuple[StoredArray, ...]
    format: str | None


def read_safetensors(files: Files, path: str) -> SafetensorsFile:
    """The arrays of a safetensors file; `CorruptManifest` for an invalid or missing one."""
    size = files.size(path)
    if size is None:
        raise file_signs.absent(files, path)
    head = files.read(path, 0, file_signs.HEAD_BYTES)
    file_signs.check_head(path, head)
    try:
        length = safetensors.header_length(head[: safetensors.LENGTH_BYTES], size, path)
        header = safetensors.decode(files.read(path, 0, safetensors.LENGTH_BYTES + length), size, path)
    except CorruptManifest as error:
        raise CorruptManifest(error.detail, hint="copy the file again, or import another step", file=path) from error
    arrays = [
        StoredArray(path, name, dtype, shape, header.header_bytes + start, strides(shape))
        for name, dtype, shape, start, _ in header.tensors
    ]
    return SafetensorsFile(tuple(arrays), (header.metadata or {}).get("format"))

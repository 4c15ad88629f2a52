"""The files of an import, export or conversion: each of literal bytes and tensors, at places known beforehand.

One executor writes them all (`holdfast_service.daemon.copying.streaming`), file by file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey


class LiteralBytes(NamedTuple):
    """Bytes that are known before any tensor is read: headers, directories, whole small files."""

    start: int
    data: bytes


class StreamedTensor(NamedTuple):
    """A tensor, row-major and without a gap, and its first byte in the file."""

    mapped: MappedTensor
    start: int


Sealing = Callable[[Mapping[TensorKey, int]], tuple[LiteralBytes, ...]]


class TargetFile(NamedTuple):
    """A file of `bytes` bytes; its name is a path below the target directory.

    `sealed` computes literals that depend on the tensors' bytes, from the CRC-32 (zip's) of each; their number and lengths
    are fixed.
    """

    name: str
    bytes: int
    literals: tuple[LiteralBytes, ...]
    tensors: tuple[StreamedTensor, ...] = ()
    sealed: Sealing | None = None


class GrowingFile:
    """A target file that is put together from its first byte on; `bytes` is its length so far."""

    def __init__(self) -> None:
        self.bytes = 0
        self._literals = [(0, bytearray())]  # a new one after each tensor
        self._tensors: list[StreamedTensor] = []

    @property
    def has_tensors(self) -> bool:
        return bool(self._tensors)

    def put(self, data: bytes) -> None:
        self._literals[-1][1].extend(data)
        self.bytes += len(data)

    def stream(self, mapped: MappedTensor) -> None:
        self._tensors.append(StreamedTensor(mapped, self.bytes))
        self.skip(mapped.spec.nbytes)

    def skip(self, count: int) -> None:
        """Leave bytes out that are written otherwise, such as sealed ones."""
        self.bytes += count
        self._literals.append((self.bytes, bytearray()))

    def made(self, name: str, sealed: Sealing | None = None) -> TargetFile:
        literals = tuple(LiteralBytes(start, bytes(data)) for start, data in self._literals if data)
        return TargetFile(name, self.bytes, literals, tuple(self._tensors), sealed)


def check(file: TargetFile) -> None:
    """`InvalidRequest` unless literals and tensors tile the file."""
    crcs = {tensor.mapped.key: 0 for tensor in file.tensors}
    literals = (*file.literals, *(file.sealed(crcs) if file.sealed is not None else ()))
    spans = [(one.start, one.start + len(one.data)) for one in literals]
    spans += [(one.start, one.start + one.mapped.spec.nbytes) for one in file.tensors]
    at = 0
    for start, stop in sorted(spans):
        if start != at:
            raise InvalidRequest(f"{file.name}: byte {min(start, at)} would be written {'never' if start > at else 'twice'}")
        at = stop
    if at != file.bytes:
        raise InvalidRequest(f"{file.name} would have {at} bytes instead of {file.bytes}")

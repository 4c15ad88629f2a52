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


class TargetFile(NamedTuple):
    """A file of `bytes` bytes; its name is a path below the target directory.

    `sealed` computes literals that depend on the tensors' bytes, from the CRC-32 (zip's) of each; their number and lengths
    are fixed.
    """

    name: str
    bytes: int
    literals: tuple[LiteralBytes, ...]
    tensors: tuple[StreamedTensor, ...] = ()
    sealed: Callable[[Mapping[TensorKey, int]], tuple[LiteralBytes, ...]] | None = None


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

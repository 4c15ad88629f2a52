"""A target file is literals and tensors that follow each other: a gap, an overlap and a wrong size are refused."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.target_files import LiteralBytes, StreamedTensor, TargetFile, check
from holdfast_formats.tensors import TensorSpec

TENSOR = MappedTensor(TensorSpec("model", "x", "F32", (2,)), (), padded=True)


def test_all_bytes_once() -> None:
    """In any order, with a trailer that depends on the tensors' bytes."""
    file = TargetFile(
        "f",
        14,
        (LiteralBytes(0, b"abcd"),),
        (StreamedTensor(TENSOR, 4),),
        lambda crcs: (LiteralBytes(12, crcs[TENSOR.key].to_bytes(2, "little")),),
    )
    check(file)
    with pytest.raises(InvalidRequest, match="f: byte 12 would be written never"):
        check(file._replace(sealed=lambda crcs: (LiteralBytes(13, b"z"),)))
    with pytest.raises(InvalidRequest, match="f: byte 4 would be written twice"):
        check(file._replace(literals=(LiteralBytes(0, b"abcde"),)))
    with pytest.raises(InvalidRequest, match="f would have 14 bytes instead of 15"):
        check(file._replace(bytes=15))

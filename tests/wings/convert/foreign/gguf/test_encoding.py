"""The head of a GGUF file, byte by byte; tests/integrations/gguf reads whole files with the package `gguf`."""

from __future__ import annotations

import struct

import pytest

from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.gguf import encoding
from holdfast_service.wings.convert.foreign.gguf.encoding import Unsigned, Value


@pytest.mark.parametrize(
    ("value", "data"),
    [
        (Unsigned(7), struct.pack("<II", 4, 7)),
        (-7, struct.pack("<Ii", 5, -7)),
        (0.5, struct.pack("<If", 6, 0.5)),
        (True, struct.pack("<I?", 7, True)),
        ("ab", struct.pack("<IQ", 8, 2) + b"ab"),
        (["a", "é"], struct.pack("<IIQ", 9, 8, 2) + struct.pack("<Q", 1) + b"a" + struct.pack("<Q", 2) + "é".encode()),
        ([1, 2], struct.pack("<IIQii", 9, 5, 2, 1, 2)),
        ([], struct.pack("<IIQ", 9, 8, 0)),
    ],
)
def test_values(value: Value, data: bytes) -> None:
    made = encoding.header({"k": value}, [])
    assert made.startswith(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + data)
    assert len(made) % encoding.ALIGNMENT_BYTES == 0


def test_places_of_tensors() -> None:
    """Dimensions from the innermost, and offsets from the end of the head, each a multiple of 32."""
    specs = [TensorSpec("g", "a", "F32", (3, 5)), TensorSpec("g", "b", "BF16", (2,)), TensorSpec("g", "c", "F16", ())]
    made = encoding.header({}, specs)[24:]
    first = struct.pack("<Q", 1) + b"a" + struct.pack("<IQQIQ", 2, 5, 3, 0, 0)
    second = struct.pack("<Q", 1) + b"b" + struct.pack("<IQIQ", 1, 2, 30, 64)
    third = struct.pack("<Q", 1) + b"c" + struct.pack("<IIQ", 0, 1, 96)
    assert made.startswith(first + second + third)

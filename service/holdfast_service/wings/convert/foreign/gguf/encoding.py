"""The bytes of a GGUF file before its tensors: version 3, little endian. `docs/gguf.md` of ggml describes them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast_formats.tensors import TensorSpec

ALIGNMENT_BYTES = 32
VERSION = 3
TYPES = {"F32": 0, "F16": 1, "BF16": 30}  # ggml's numbers of dtypes that are not quantised


class Unsigned(NamedTuple):
    """A number that GGUF stores as uint32."""

    value: int


Scalar = str | bool | int | float | Unsigned
Value = Scalar | Sequence[str] | Sequence[int] | Sequence[float]

_STRING, _ARRAY = 8, 9


def aligned(count: int) -> int:
    return count + -count % ALIGNMENT_BYTES


def header(metadata: Mapping[str, Value], tensors: Sequence[TensorSpec]) -> bytes:
    """The head of a file, padded to its first tensor. Tensors follow in this order, each padded to 32 bytes.

    An `int` is stored as int32, a `float` as float32. All values of a sequence have the type of its first one.
    """
    made = bytearray(b"GGUF" + struct.pack("<IQQ", VERSION, len(tensors), len(metadata)))
    for key, value in metadata.items():
        made += _text(key) + _typed(value)
    start = 0
    for spec in tensors:
        made += _text(spec.name) + struct.pack("<I", len(spec.shape))
        made += struct.pack(f"<{len(spec.shape)}Q", *reversed(spec.shape))  # GGUF counts dimensions from the innermost
        made += struct.pack("<IQ", TYPES[spec.dtype], start)
        start += aligned(spec.nbytes)
    return bytes(made) + bytes(aligned(len(made)) - len(made))


def _text(text: str) -> bytes:
    data = text.encode(errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _typed(value: Value) -> bytes:
    if isinstance(value, Sequence) and not isinstance(value, str | Unsigned):
        kind = _scalar(value[0])[0] if value else _STRING
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(_scalar(one)[1] for one in value)
    kind, data = _scalar(value)
    return struct.pack("<I", kind) + data


def _scalar(value: Scalar) -> tuple[int, bytes]:
    """The type's number, and the bytes."""
    if isinstance(value, Unsigned):
        return 4, struct.pack("<I", value.value)
    if isinstance(value, bool):  # before int, which it is
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 5, struct.pack("<i", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return _STRING, _text(value)

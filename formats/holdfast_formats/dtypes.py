"""Element types: safetensors' names, widths, storage order and numpy counterparts.

Source of names, widths and order: `enum Dtype` in safetensors 0.8 (`safetensors/src/tensor.rs`); files order their tensors
by descending position in that enumeration, then by name.
"""

from __future__ import annotations

from functools import cache

import ml_dtypes
import numpy as np

from .errors import InvalidRequest, StateMismatch

# What an export converts: values of other types are whole numbers, or mean nothing without a scale beside them.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Name -> bits of one element, in the order in which safetensors declares them.
BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
# Types that safetensors has a name for and no library reads: neither torch nor numpy has them.
UNREAD = frozenset({"F6_E2M3", "F6_E3M2"})
ORDER: dict[str, int] = {name: position for position, name in enumerate(BITS)}

_NUMPY: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I16": np.dtype("<i2"),
    "U16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "F32": np.dtype("<f4"),
    "C64": np.dtype("<c8"),
    "F64": np.dtype("<f8"),
    "I64": np.dtype("<i8"),
    "U64": np.dtype("<u8"),
}


def bits(dtype: str) -> int:
    """Width of one element in bits; `InvalidRequest` for a name safetensors does not know."""
    try:
        return BITS[dtype]
    except KeyError:
        raise InvalidRequest(f"unknown dtype {dtype!r}", hint=f"one of {', '.join(BITS)}") from None


def nbytes(dtype: str, elements: int, name: str = "") -> int:
    """Bytes of `elements` elements; `StateMismatch`, naming the tensor, when they do not end at a byte."""
    total = bits(dtype) * elements
    if total % 8:
        raise StateMismatch(
            f"tensor {name!r}: {elements} elements of {dtype} ({bits(dtype)} bits each) do not fill whole bytes",
            hint="pad the last dimension so that the elements fill whole bytes",
        )
    return total // 8


@cache
def to_numpy(dtype: str) -> np.dtype:
    """The numpy dtype of the same bytes; `InvalidRequest` for the sub-byte types, which numpy cannot address."""
    if dtype not in _NUMPY:
        width = bits(dtype)
        raise InvalidRequest(f"{dtype} ({width} bits) has no numpy dtype", hint="read it as bytes (U8)")
    return _NUMPY[dtype]

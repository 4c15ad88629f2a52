"""Element types as numpy's and torch's pickles name them, and safetensors' names of them."""

from __future__ import annotations

# By the code in a pickled `numpy.dtype`; `V2` is bfloat16 only if ml_dtypes names it so.
NUMPY = {
    "b1": "BOOL",
    "u1": "U8",
    "i1": "I8",
    "u2": "U16",
    "i2": "I16",
    "u4": "U32",
    "i4": "I32",
    "u8": "U64",
    "i8": "I64",
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "c8": "C64",
}

# By the names of ml_dtypes' classes, which numpy pickles in place of a code.
ML_DTYPES = {
    "ml_dtypes.bfloat16": "BF16",
    "ml_dtypes.float8_e4m3fn": "F8_E4M3",
    "ml_dtypes.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "ml_dtypes.float8_e5m2": "F8_E5M2",
    "ml_dtypes.float8_e5m2fnuz": "F8_E5M2FNUZ",
    "ml_dtypes.float8_e8m0fnu": "F8_E8M0",
}

# By the names of torch's dtypes.
TORCH = {
    "torch.bool": "BOOL",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.uint16": "U16",
    "torch.int16": "I16",
    "torch.uint32": "U32",
    "torch.int32": "I32",
    "torch.uint64": "U64",
    "torch.int64": "I64",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.complex64": "C64",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e4m3fnuz": "F8_E4M3FNUZ",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e5m2fnuz": "F8_E5M2FNUZ",
    "torch.float8_e8m0fnu": "F8_E8M0",
}

TORCH_NAMES = {dtype: name for name, dtype in TORCH.items()}

# By the names of torch's storage classes; an untyped one holds bytes, of which the tensor knows the type.
STORAGES = {
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "FloatStorage": "F32",
    "DoubleStorage": "F64",
    "ComplexFloatStorage": "C64",
}
UNTYPED = "torch.storage.UntypedStorage"
STORAGE_CLASSES = {
    **{f"torch.{device}{name}": dtype for name, dtype in STORAGES.items() for device in ("", "cuda.")},
    UNTYPED: "U8",
}

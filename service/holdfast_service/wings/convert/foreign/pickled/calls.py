"""The arrays and tensors of numpy's and torch's functions in a pickle; none of these functions is run.

Each function here takes the arguments of a call, and raises `Unfit` for those that numpy's and torch's own pickles never
have.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats import dtypes
from holdfast_formats.layout.parts import strides
from holdfast_formats.tensors import DIMENSIONS_MAX
from holdfast_service.wings.convert.foreign.pickled.dtypes import ML_DTYPES, NUMPY, STORAGE_CLASSES, TORCH
from holdfast_service.wings.convert.foreign.pickled.values import LatinArray, PickledArray, PickledBytes, PickledGlobal

_SIZE_MAX = 2**63 - 1
_STEP_MAX = 2**48  # elements; also of dimensions of size one, whose stride is unused
_CLASSES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


class Unfit(Exception):
    """The error of a call; the machine adds file and byte."""


class NumpyDtype:
    """A `numpy.dtype` that is being read: a code such as `f4`, or the name of a class of ml_dtypes. `problem` says why no
    array of it can be read.
    """

    __slots__ = ("code", "problem")

    def __init__(self, code: str) -> None:
        self.code, self.problem = code, ""

    @property
    def of_number(self) -> np.dtype[Any]:
        """Numpy's own, of a single number."""
        return np.dtype("<c16") if self.code == "c16" and not self.problem else dtypes.to_numpy(self.name)

    @property
    def name(self) -> str:
        if self.problem:
            raise Unfit(self.problem)
        found = NUMPY.get(self.code) or ML_DTYPES.get(self.code)
        if found is None:
            raise Unfit(f"has values of dtype {self.code!r}, which no checkpoint can hold")
        return found


class UnfilledArray:
    """An array before its values are read; `places` are its positions in the memo."""

    __slots__ = ("places",)

    def __init__(self) -> None:
        self.places: list[int] = []


class LatinBytes(NamedTuple):
    """Bytes stored as Latin-1 text, encoded as UTF-8. `characters` is None if not counted."""

    offset: int
    length: int
    characters: int | None


def array(file: str, state: Any) -> PickledArray | LatinArray:
    """The state of `ndarray.__setstate__`: version, shape, dtype, Fortran order, bytes."""
    if not (isinstance(state, tuple) and len(state) == 5 and isinstance(state[2], NumpyDtype)):
        raise Unfit("has an array in a form that numpy does not write")
    _, shape, dtype, fortran, data = state
    return _array(file, data, dtype.name, check_shape(shape), fortran is True)


def from_buffer(file: str, args: tuple[Any, ...]) -> PickledArray | LatinArray:
    """`numpy._core.numeric._frombuffer(bytes, dtype, shape, order)`: arrays of protocol 5."""
    if not (len(args) == 4 and isinstance(args[1], NumpyDtype) and args[3] in ("C", "F")):
        raise Unfit("has an array in a form that numpy does not write")
    return _array(file, args[0], args[1].name, check_shape(args[2]), args[3] == "F")


def _array(file: str, data: Any, dtype: str, shape: tuple[int, ...], fortran: bool) -> PickledArray | LatinArray:
    steps = strides(shape[::-1])[::-1] if fortran else strides(shape)
    count = prod(shape) * dtypes.bits(dtype) // 8
    if isinstance(data, PickledBytes) and data.length == count:
        return PickledArray(dtype, shape, steps, "", data.offset, file)
    if isinstance(data, LatinBytes) and _fits(data, count):
        if data.characters == data.length:  # all of it is ASCII
            return PickledArray(dtype, shape, steps, "", data.offset, file)
        return LatinArray(dtype, shape, steps, data.offset, data.length, file)
    raise Unfit(f"has an array {dtype}{list(shape)} whose values have another size")


def _fits(data: LatinBytes, count: int) -> bool:
    return data.characters == count if data.characters is not None else data.length // 2 <= count <= data.length


def check_shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple) or len(shape) > DIMENSIONS_MAX:
        raise Unfit(f"has an array whose shape is malformed or has over {DIMENSIONS_MAX} dimensions")
    if not all(type(n) is int and 0 <= n <= _SIZE_MAX for n in shape) or prod(shape) > _SIZE_MAX // 16:
        raise Unfit("has an array with invalid numbers in its shape")
    return shape


def numpy_dtype(args: tuple[Any, ...]) -> NumpyDtype:
    """`numpy.dtype(code, False, True)`."""
    given = args[0] if args else None
    code = given.name if isinstance(given, PickledGlobal) else given
    if not isinstance(code, str) or len(code) > 64:
        raise Unfit("has a dtype that is neither a code nor a class")
    return NumpyDtype(code)


def numpy_dtype_state(dtype: NumpyDtype, state: Any) -> None:
    """The state of `dtype.__setstate__`, in which only the byte order may matter; it must be little-endian."""
    if not (isinstance(state, tuple) and len(state) >= 8):
        raise Unfit(f"has a dtype {dtype.code!r} in a form that numpy does not write")
    if state[1] not in ("<", "|", "="):
        order = state[1][:8] if type(state[1]) is str else ""
        dtype.problem = f"has values in the byte order {order!r}; only little-endian values can be read"
    if any(part is not None for part in state[2:5]):
        dtype.problem = "has an array of structures"


def tensor(args: tuple[Any, ...], dtype: str | None = None) -> PickledArray:
    """`torch._utils._rebuild_tensor(storage, offset, size, stride)`."""
    if len(args) != 4 or not _is_storage(args[0]) or type(args[1]) is not int:
        raise Unfit("has a tensor in a form that torch does not write")
    storage, offset, shape, steps = args[0], args[1], check_shape(args[2]), args[3]
    if not (isinstance(steps, tuple) and len(steps) == len(shape) and all(type(s) is int for s in steps)):
        raise Unfit(f"has a tensor of shape {list(shape)} with malformed strides")
    dtype = dtype or storage.dtype
    width, held = dtypes.bits(dtype) // 8, storage.shape[0] * dtypes.bits(storage.dtype) // 8
    reach = sum((n - 1) * step for n, step in zip(shape, steps, strict=True)) + 1 if prod(shape) else 0
    if offset < 0 or any(not 0 <= step < _STEP_MAX for step in steps) or (reach and (offset + reach) * width > held):
        raise Unfit(f"has a tensor {dtype}{list(shape)} that reaches outside its storage {storage.storage!r}")
    if prod(shape) * width > held:
        raise Unfit(
            f"has a tensor {dtype}{list(shape)} whose elements share bytes: it has {prod(shape) * width}, and its storage "
            f"{storage.storage!r} {held}"
        )
    start = storage.offset + (offset * width if reach else 0)
    return PickledArray(dtype, shape, steps, storage.storage, start, storage.file, storage.member)


def _is_storage(value: Any) -> bool:
    return isinstance(value, PickledArray) and len(value.shape) == 1 and value.strides == (1,)


def tensor_v2(args: tuple[Any, ...]) -> PickledArray:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata])`."""
    if not 6 <= len(args) <= 7 or (len(args) == 7 and args[6]):
        raise Unfit("has a tensor with a conjugate or negative bit, or in a form that torch does not write")
    return tensor(args[:4])


def tensor_v3(args: tuple[Any, ...]) -> PickledArray:
    """`_rebuild_tensor_v3(storage, offset, size, stride, requires_grad, hooks, dtype[, metadata])`."""
    if not 7 <= len(args) <= 8 or (len(args) == 8 and args[7]):
        raise Unfit("has a tensor with a conjugate or negative bit, or in a form that torch does not write")
    return tensor(args[:4], _torch_dtype(args[6]))


def _torch_dtype(given: Any) -> str:
    if not isinstance(given, PickledGlobal) or given.name not in TORCH:
        name = given.name if isinstance(given, PickledGlobal) else "without a name"
        raise Unfit(f"has a tensor of dtype {name}, which no checkpoint can hold")
    return TORCH[given.name]


def parameter(args: tuple[Any, ...]) -> PickledArray:
    """`_rebuild_parameter(data, requires_grad, hooks[, state])`: its data. Attributes of the parameter are ignored."""
    if not 3 <= len(args) <= 4 or not isinstance(args[0], PickledArray):
        raise Unfit("has a parameter in a form that torch does not write")
    return args[0]


def device_tensor(args: tuple[Any, ...]) -> PickledArray:
    """`_rebuild_device_tensor_from_numpy(data, dtype, device, requires_grad)`, and the same from a tensor."""
    if len(args) != 4 or not isinstance(args[0], PickledArray) or args[0].dtype != _torch_dtype(args[1]):
        raise Unfit("has a tensor whose values and dtype disagree")
    return args[0]


# What is only a name: types of values and of storages, and classes that calls of `KNOWN_CALLS` take.
NAMES = frozenset(
    (
        *TORCH,
        *STORAGE_CLASSES,
        *ML_DTYPES,
        *_CLASSES,
        "numpy.ndarray",
        *(f"builtins.{n}" for n in ("object", "int", "float", "str")),
    )
)
TENSORS: dict[str, Callable[[tuple[Any, ...]], PickledArray]] = {
    "torch._utils._rebuild_tensor": tensor,
    "torch._utils._rebuild_tensor_v2": tensor_v2,
    "torch._utils._rebuild_tensor_v3": tensor_v3,
    "torch._utils._rebuild_parameter": parameter,
    "torch._utils._rebuild_parameter_with_state": parameter,
    "torch._utils._rebuild_device_tensor_from_numpy": device_tensor,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": device_tensor,
}


def subclass(args: tuple[Any, ...]) -> PickledArray:
    """`torch._tensor._rebuild_from_type_v2(function, class, args, state)`: a tensor or parameter with attributes."""
    if not (len(args) == 4 and isinstance(args[0], PickledGlobal) and isinstance(args[2], tuple)):
        raise Unfit("has a tensor in a form that torch does not write")
    function, kind = args[0].name, args[1].name if isinstance(args[1], PickledGlobal) else "without a name"
    if function not in TENSORS or kind not in _CLASSES:
        raise Unfit(f"has a tensor of class {kind}, which stores its values in its own format")
    return TENSORS[function](args[2])

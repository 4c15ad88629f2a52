"""Maps torch's element types to the names of safetensors, and refuses tensors that no safetensors file can hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast_formats.errors import InvalidRequest

# torch's name -> safetensors' name. Types that this torch lacks (2.6 has no float4) are left out of the tables below.
_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
}
_TO_SAFETENSORS: dict[torch.dtype, str] = {getattr(torch, t): s for t, s in _NAMES.items() if hasattr(torch, t)}
_TO_TORCH: dict[str, torch.dtype] = {s: t for t, s in _TO_SAFETENSORS.items()}

UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}  # numpy has all of them
SIGNED = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # torch copies these in vectors, the others not


def safetensors_name(dtype: torch.dtype, name: str = "") -> str:
    """safetensors' name of a torch dtype; `InvalidRequest`, naming the tensor, when the format has none for it."""
    if dtype not in _TO_SAFETENSORS:
        raise InvalidRequest(
            f"tensor {name!r}: {dtype} cannot be stored in safetensors",
            hint=f"one of {', '.join(map(str, _TO_SAFETENSORS))}",
        )
    return _TO_SAFETENSORS[dtype]


def torch_dtype(dtype: str, name: str = "") -> torch.dtype:
    """The torch dtype of a safetensors name; `InvalidRequest`, naming the tensor, when this torch has none for it."""
    if dtype not in _TO_TORCH:
        raise InvalidRequest(
            f"tensor {name!r}: torch {torch.__version__} has no dtype for {dtype}",
            hint="use a newer torch, or exclude this name with exclude=",
        )
    return _TO_TORCH[dtype]


def packing(dtype: torch.dtype) -> int:
    """How many of the format's elements one torch element contains: 2 for float4, which comes in pairs."""
    return 2 if _TO_SAFETENSORS.get(dtype) == "F4" else 1


def element_shape(tensor: torch.Tensor, name: str = "") -> tuple[int, ...]:
    """The tensor's shape in the format's elements: float4 doubles the last dimension."""
    shape = tuple(tensor.shape)
    if packing(tensor.dtype) == 1:
        return shape
    if not shape:
        raise InvalidRequest(
            f"tensor {name!r}: a 0-d tensor of {tensor.dtype} packs two elements, which a 0-d shape cannot describe",
            hint="keep it in a dimension: tensor.reshape(1)",
        )
    return (*shape[:-1], 2 * shape[-1])


def local_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape torch gives a tensor that has `shape` in the format's elements: the reverse of `element_shape`."""
    return shape if packing(dtype) == 1 else (*shape[:-1], shape[-1] // 2)


def check_storable(tensor: torch.Tensor, name: str) -> None:
    """Refuse all but plain strided memory without overlap, of a dtype that safetensors knows."""
    reason = _obstacle(tensor)
    if reason:
        raise InvalidRequest(
            f"tensor {name!r} is {reason} and cannot be stored", hint="convert it, or leave it out of the state"
        )
    if overlaps(tensor):
        raise InvalidRequest(
            f"tensor {name!r} is expanded or overlaps itself: several elements share memory, so it could not be restored",
            hint="use tensor.contiguous() instead: register_buffer(name, tensor.contiguous()), or exclude this name "
            "with exclude=",
        )
    safetensors_name(tensor.dtype, name)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of strided memory overlap, as in tensors made by `expand` and `as_strided`."""
    return not tensor.is_contiguous() and shares_places(tuple(tensor.shape), tensor.stride())


def shares_places(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of an array of this form are at the same place."""
    steps = sorted((abs(stride), n) for n, stride in zip(shape, strides, strict=True) if n > 1)
    if 0 in shape or not steps:
        return False
    reach = 0  # of all smaller strides together
    for stride, n in steps:
        if stride <= reach:
            break
        reach += stride * (n - 1)
    else:
        return False
    if prod(n for _, n in steps) > 1 + sum(stride * (n - 1) for stride, n in steps):
        return True
    places = np.zeros(1, np.int64)  # interleaved strides: compare all addresses
    for stride, n in steps:
        places = np.add.outer(places, np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return np.unique(places).size < places.size


_PLAIN = (torch.Tensor, torch.nn.Parameter)  # asking torch for the wrapped tensor takes longer than all else here


class MemorySpan(NamedTuple):
    """Addresses from the first byte of a tensor to behind its last one."""

    start: int
    stop: int


def memory_span(tensor: torch.Tensor) -> MemorySpan:
    """The memory of a plain tensor, including the gaps of a view."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return MemorySpan(start, start + (last + 1) * tensor.element_size() if tensor.numel() else start)


class MemorySpans:
    """Spans of memory, of which several may be slices of one buffer."""

    def __init__(self, spans: Iterable[MemorySpan]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(spans):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def meet(self, span: MemorySpan) -> bool:
        before = bisect_left(self._starts, span.stop) - 1
        return before >= 0 and self._stops[before] > span.start


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether this is plain strided memory, whatever its dtype."""
    return _obstacle(tensor) is None


def _answers_for_itself(tensor: torch.Tensor) -> bool:
    """Whether a tensor's class implements torch's operations itself, so that its values are not in its own memory.

    This holds for torchao's 8-bit state, MaskedTensor and FakeTensor. It does not hold for a subclass that only renames or
    adds functions.
    """
    own = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return own or is_traceable_wrapper_subclass(tensor)


def _obstacle(tensor: torch.Tensor) -> str | None:
    if torch.nn.parameter.is_lazy(tensor):
        return "a lazy parameter without a shape yet (run one forward pass first)"
    if type(tensor) not in _PLAIN and _answers_for_itself(tensor):
        return f"a {type(tensor).__name__}, which has no storage of its own"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}, not strided"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})"
    if tensor.is_meta:
        return "on the meta device, without memory"
    if tensor._is_zerotensor() or torch._is_functional_tensor(tensor):
        return "one of torch's own, without memory"
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return "without memory: its storage was freed"
    if tensor.is_conj() or tensor.is_neg():
        return "a lazy conjugate or negative view (call resolve_conj() or resolve_neg())"
    return None


def as_integers(tensor: torch.Tensor, kinds: Mapping[int, torch.dtype]) -> torch.Tensor:
    """The same memory as integers as wide as the elements: copies are exact, also of NaN payloads."""
    if tensor.is_conj() or tensor.is_neg():
        raise InvalidRequest("a lazily conjugated or negated tensor cannot be staged", hint="call resolve_conj() on it")
    wide = kinds.get(tensor.element_size())
    if wide is None:
        raise InvalidRequest(
            f"{tensor.dtype} cannot be staged: its elements have {tensor.element_size()} bytes",
            hint="convert it, or leave it out of the state",
        )
    return tensor.detach().view(wide)

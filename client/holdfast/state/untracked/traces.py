"""Traces of values, to detect later changes: numbers and texts themselves, a tensor's identity and version, a container's
items.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Set
from itertools import chain, islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

from holdfast.state.untracked.buffers import version

_CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType)
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_EXACT = frozenset({bool, int, str, bytes, type(None)})
DEPTH_MAX, ITEMS_MAX, SAMPLE_BYTES_MAX = 2, 32, 2**16  # of a larger one, a part is looked at
_CONTAINERS = frozenset({dict, list, tuple, set, frozenset, deque})  # what needs no other question
UNKNOWN = "a value that is not compared"


def is_plain(value: object) -> bool:
    """Whether a value is immutable and compared by value."""
    return type(value) in PLAIN or isinstance(value, np.generic)


class _Tensor:
    """A tensor at its version. It is not kept alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = TensorWeakRef(tensor), version(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Tensor) or self._version != other._version:
            return False
        one = self._tensor()
        return one is not None and one is other._tensor()

    __hash__ = None  # type: ignore[assignment]


class ForwardTracer(NamedTuple):
    """Makes traces. Saved values and results of a forward pass have none."""

    is_saved: Callable[[object], bool]

    def trace(self, value: object, depth: int = 0) -> object:
        """A trace of this value, equal until it changes. `UNKNOWN` for kinds that are not traced."""
        if is_plain(value):
            return type(value), value if type(value) in _EXACT else repr(value)
        if type(value) in _CONTAINERS:
            return UNKNOWN if depth >= DEPTH_MAX or self.is_saved(value) else self._inside(value, depth + 1)
        if isinstance(value, torch.Tensor):
            return UNKNOWN if value.grad_fn is not None or self.is_saved(value) else _Tensor(value)
        if isinstance(value, np.ndarray):
            return type(value), value.shape, str(value.dtype), _sample(value)
        if (drawn := _drawn(value)) is not None:
            return type(value), drawn
        if depth >= DEPTH_MAX or isinstance(value, type) or self.is_saved(value):
            return UNKNOWN
        return self._inside(value, depth + 1)

    def _inside(self, value: object, depth: int) -> object:
        if isinstance(value, dict):
            return type(value), len(value), [(_name(k), self.trace(v, depth)) for k, v in _ends(value.items())]
        if isinstance(value, Mapping):
            return type(value), len(value), [(_name(k), self.trace(v, depth)) for k, v in _ends(list(value.items()))]
        if isinstance(value, list | tuple | deque):
            return type(value), len(value), [self.trace(item, depth) for item in _ends(value)]
        if isinstance(value, Set):
            return type(value), len(value), frozenset(islice(value, ITEMS_MAX))  # in the same order while nothing changes
        if isinstance(value, nn.Module):
            return type(value), [self.trace(tensor, depth) for tensor in islice(value.parameters(), ITEMS_MAX)]
        if isinstance(value, torch.optim.Optimizer):
            kept = (tensor for held in islice(value.state.values(), ITEMS_MAX) for tensor in held.values())
            return type(value), len(value.state), [self.trace(tensor, depth) for tensor in kept]
        held = _attributes(value)
        return UNKNOWN if held is None else (type(value), [(name, self.trace(one, depth)) for name, one in _ends(held)])


def is_data(value: object) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) or _drawn(value) is not None


def is_object(value: object) -> bool:
    return not (is_plain(value) or is_data(value) or isinstance(value, Mapping | list | tuple | deque | Set))


def _attributes(value: object) -> list[tuple[str, object]] | None:
    """The attributes of an object; None for a function, and for a configuration, which is not trained."""
    held, slots = getattr(value, "__dict__", None), getattr(type(value), "__slots__", ())
    if callable(getattr(type(value), "to_dict", None)) or isinstance(value, _CODE):
        return None
    if isinstance(held, dict):
        return list(held.items())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)] or None


def _drawn(value: object) -> object:
    """The position of a stream of random numbers; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_offset() if value.device.type == "cuda" else zlib.crc32(value.get_state().numpy().tobytes())
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    return str(value.get_state(legacy=False)) if isinstance(value, np.random.RandomState) else None


def _sample(array: np.ndarray[Any, Any]) -> int:
    step = max(array.nbytes // SAMPLE_BYTES_MAX, 1)
    part = np.ascontiguousarray(array.reshape(-1)[::step])
    return hash(part.tobytes()) if not part.dtype.hasobject else hash(tuple(map(id, part)))


def _name(key: Hashable) -> object:
    return key if is_plain(key) else id(key)


def _ends(items: Any) -> Any:
    """All items, or the first and the last of many."""
    if len(items) <= ITEMS_MAX:
        return items
    half = ITEMS_MAX // 2
    return chain(islice(items, half), islice(reversed(items), half))

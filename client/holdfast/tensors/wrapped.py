"""Wrapper tensors, such as torchao's 8-bit optimizer state: one outer tensor, several plain ones inside.

`__tensor_flatten__` and `__tensor_unflatten__` of their class take them apart and rebuild them. Class and context are
described as data. Rebuilding imports nothing: the class has to be loaded already.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeGuard

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.tensors.fragments import is_dtensor
from holdfast.tensors.torch_dtypes import has_memory
from holdfast_formats.errors import CorruptManifest, InvalidRequest, StateMismatch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SCALARS = (bool, int, float, str, type(None))
Description = dict[str, Any]  # "class", "context", "shape", "stride", "inner": JSON values


def is_wrapped(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this tensor's values are in tensors that it holds; not DTensors (parts with places) nor nested tensors
    (no sizes).
    """
    if type(value) in _PLAIN or not isinstance(value, torch.Tensor) or is_dtensor(value) or value.is_nested:
        return False
    return is_traceable_wrapper_subclass(value)


def held_by(value: object) -> object:
    """The tensor of this rank in a DTensor, as it is: its `to_local()` may be a copy if it is a wrapper. Else the value."""
    return value._local_tensor if is_dtensor(value) else value  # type: ignore[attr-defined]


def inner(value: torch.Tensor, path: str) -> dict[str, torch.Tensor]:
    """The plain tensors inside, by attribute; `InvalidRequest`, with the path, for one that is no plain memory."""
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    inner_tensors = {str(name): getattr(value, name) for name in names}
    for name, tensor in inner_tensors.items():
        if not name.isidentifier() or not isinstance(tensor, torch.Tensor) or not has_memory(tensor):
            raise InvalidRequest(
                f"{path}: a {type(value).__name__} whose {name} is a {type(tensor).__name__} cannot be stored",
                hint="only wrappers of plain tensors can; save without this optimizer: save(groups=…)",
            )
    return inner_tensors


def describe(value: torch.Tensor, path: str) -> Description:
    """Class, context, shape and stride as JSON values; `InvalidRequest` for a context that these cannot express."""
    names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
    return {
        "class": class_name(type(value)),
        "context": _encoded(context, path),
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "inner": [str(name) for name in names],
    }


def reshaped(description: Description, shape: Sequence[int]) -> Description:
    """The description of a tensor of the same kind with another shape, of this rank's part or of the whole."""
    stride = [prod(shape[d + 1 :]) for d in range(len(shape))]
    context = _with_shape(description["context"], description["shape"], list(shape))
    return {**description, "context": context, "shape": list(shape), "stride": stride}


def _with_shape(context: Any, before: list[int], after: list[int]) -> Any:
    match context:
        case [str(kind), list(items)]:
            return [kind, after if items == before else [_with_shape(item, before, after) for item in items]]
    return context


def class_name(kind: type) -> str:
    """`module:qualified.name`, by which a class is found again among those that are loaded."""
    return f"{kind.__module__}:{kind.__qualname__}"


def check_alike(live: object, description: Description, path: str) -> None:
    """`StateMismatch` unless the live tensor has the stored class and context."""
    stored = f"{_words(description)} was stored"
    if not is_wrapped(live):
        raise StateMismatch(f"{path}: {stored}, but the live one is a {type(live).__name__}", hint=_SAME)
    assert isinstance(live, torch.Tensor)
    now = describe(live, path)
    if {**now, "stride": None} != {**description, "stride": None}:
        raise StateMismatch(f"{path}: {stored}, but the live one is {_words(now)}", hint=_SAME)


_SAME = "use the optimizer that was saved, with the same options; or leave its state out: restore(groups=…)"


def find_class(description: Description, path: str) -> type[torch.Tensor]:
    """The stored class, among the loaded ones; `StateMismatch` if it is not loaded, or not such a class."""
    module, _, name = str(description.get("class")).partition(":")
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    offers = isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")
    if not offers or class_name(kind) != description.get("class"):
        raise StateMismatch(
            f"{path} was stored as a {description.get('class')}, which is not loaded in this process",
            hint="create the optimizer that was saved, which imports it, before restore()",
        )
    return kind  # type: ignore[no-any-return]


def build(
    kind: type[torch.Tensor], description: Description, tensors: Mapping[str, torch.Tensor], path: str
) -> torch.Tensor:
    """Rebuild a tensor from the plain ones inside; `StateMismatch` if its class makes another one of them."""
    shape, stride = torch.Size(description["shape"]), tuple(description["stride"])
    try:
        tensor = kind.__tensor_unflatten__(dict(tensors), _decoded(description["context"], path), shape, stride)  # type: ignore[attr-defined]
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError) as error:
        raise StateMismatch(f"{path}: {kind.__name__} refuses what was stored: {error}", hint=_SAME) from error
    check_alike(tensor, description, path)
    return tensor  # type: ignore[no-any-return]


def check_description(description: object, path: str) -> Description:
    """A checkpoint's description of a wrapper; `CorruptManifest` if it is invalid."""
    sound = (
        isinstance(description, dict)
        and description.keys() >= {"class", "context", "shape", "stride", "inner"}
        and all(
            isinstance(description[one], list) and all(type(n) is int for n in description[one])
            for one in ("shape", "stride")
        )
        and isinstance(description["inner"], list)
        and all(isinstance(name, str) and name.isidentifier() for name in description["inner"])
    )
    if not sound:
        raise CorruptManifest(
            f"{path}: the stored description of a wrapper tensor is not valid",
            hint="restore another step, or exclude this name with exclude=",
            file="state.json",
        )
    return description  # type: ignore[return-value]


def _words(description: Description) -> str:
    name = str(description["class"]).rpartition(":")[2]
    return f"a {name} of shape {description['shape']} with context {description['context']}"


def _encoded(value: Any, path: str) -> Any:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    if isinstance(value, torch.Size):
        return ["size", [_encoded(item, path) for item in value]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_encoded(item, path) for item in value]]
    if type(value) is dict and all(type(key) is str for key in value):
        return ["dict", {key: _encoded(item, path) for key, item in value.items()}]
    raise InvalidRequest(
        f"{path}: the context of this wrapper tensor has a {type(value).__name__}, which cannot be recorded as data",
        hint="save without this optimizer: save(groups=…)",
    )


def _decoded(value: Any, path: str) -> Any:
    if type(value) in _SCALARS:
        return value
    match value:
        case ["dtype", str(name)] if isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        case ["size", [*items]]:
            return torch.Size(_decoded(item, path) for item in items)
        case ["list", [*items]]:
            return [_decoded(item, path) for item in items]
        case ["tuple", [*items]]:
            return tuple(_decoded(item, path) for item in items)
        case ["dict", dict(items)]:
            return {key: _decoded(item, path) for key, item in items.items()}
    raise CorruptManifest(
        f"{path}: the stored context of a wrapper tensor is not valid",
        hint="restore another step, or exclude this name with exclude=",
        file="state.json",
    )

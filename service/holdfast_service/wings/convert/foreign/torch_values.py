"""Values of torch files as tensors of a listing: state dicts, and plain values beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast_formats.errors import CheckpointError, InvalidRequest, StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_service.wings.convert.foreign import json_values
from holdfast_service.wings.convert.foreign.pickles import LatinArray, PickledArray, PickledBytes


def tensor(array: PickledArray, group: str, name: str) -> ForeignTensor:
    made = array.stored(name).tensor(group, name)
    made.spec.check()
    return made


def state_dict(value: Any, file: str, group: str) -> list[ForeignTensor]:
    """The tensors of a state dict; `StateMismatch` if it has anything but tensors by name."""
    if not isinstance(value, dict):
        raise mismatch(file, "", f"holds a {_kind(value)}, not a state dict")
    tensors = []
    for name, array in value.items():
        if not isinstance(name, str) or not isinstance(array, PickledArray):
            raise mismatch(file, str(name), f"has {name!r}, which is a {_kind(array)}, not a named tensor")
        if array.dtype == "U16" and not array.storage:
            what = f"has {name!r}, a numpy array of U16: these may be bfloat16 values, which numpy writes as integers"
            raise mismatch(file, name, what, "save it as a torch tensor, of dtype torch.uint16 or torch.bfloat16")
        tensors.append(tensor(array, group, name))
    return tensors


def plain(value: Any, file: str, key: str) -> Any:
    """The JSON of a plain Python value; `StateMismatch` for anything else."""

    def other(trail: json_values.Trail, inner: Any) -> Any:
        path = json_values.path_of((key, *trail))
        raise mismatch(file, path, f"has {path!r}, which is a {_kind(inner)}: only tensors and plain values are kept")

    try:
        return json_values.encode(value, other)
    except InvalidRequest as error:
        raise mismatch(file, key, f"has {key!r}, which cannot be kept: {error.detail}") from None


def integer(held: Mapping[Any, Any], key: str, file: str) -> int:
    """A required number; `StateMismatch` by key and file."""
    value = held.get(key)
    if type(value) is not int or value < 0:
        raise mismatch(file, key, f"has no number {key!r}")
    return value


def mismatch(file: str, key: str, what: str, hint: str = "") -> CheckpointError:
    hint = hint or "remove it with the program that wrote the file, and save again"
    return StateMismatch(f"{file} {what}", hint=hint, file=file, **({"tensor": key} if key else {}))


def _kind(value: Any) -> str:
    if isinstance(value, PickledArray):
        return "tensor" if value.storage else "numpy array"
    if isinstance(value, LatinArray):
        return "numpy array"
    if isinstance(value, PickledBytes):
        return "bytes object"
    name = getattr(value, "name", None)
    return f"{name} object" if isinstance(name, str) else type(value).__name__

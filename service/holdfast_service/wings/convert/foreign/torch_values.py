"""Values of torch files as tensors of a listing: state dicts, and plain values beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast_formats.errors import CheckpointError, InvalidRequest, Refused, StateMismatch
from holdfast_formats.mapping.listing import ForeignTensor, RefusedPart
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import json_values, pickles
from holdfast_service.wings.convert.foreign.pickles import AnyArray, LatinArray, LatinDecoder, PickledOpaque

_BY_NAME = "save the tensors by name, with the program that wrote it: torch.save({'NAME': tensor}, FILE)"
_RENAMED = "give each tensor its own name: torch.save({f'{key}_': tensor for key, tensor in saved.items()}, FILE)"
_STATE_DICT = (
    "save its state dict: model = torch.load(FILE, weights_only=False), with the program that wrote it; then "
    "torch.save(model.state_dict(), FILE)"
)


def tensor(array: AnyArray, group: str, name: str) -> ForeignTensor:
    if isinstance(array, LatinArray):
        spec = TensorSpec(group, name, array.dtype, array.shape)
        made = ForeignTensor(spec, (), decoder=LatinDecoder(array, array.dtype))
    else:
        made = array.stored(name).tensor(group, name)
    made.spec.check()
    return made


class StateDict(NamedTuple):
    """The tensors of a state dict, and the entries that are refused."""

    tensors: tuple[ForeignTensor, ...]
    refused: tuple[RefusedPart, ...] = ()

    def whole(self) -> tuple[ForeignTensor, ...]:
        """The tensors; the error of the first entry that is refused."""
        if self.refused:
            raise self.refused[0].error
        return self.tensors


def state_dict(value: Any, file: str, group: str) -> StateDict:
    """The tensors of a state dict by name, of a number by its digits; its other entries are refused.

    `StateMismatch` if it is no dict, or has no tensor at all.
    """
    if not isinstance(value, dict):
        hint = _STATE_DICT if isinstance(value, PickledOpaque) else _BY_NAME
        raise mismatch(file, "", f"holds a {pickles.kind_of(value)}, not a state dict", hint)
    if value and not any(isinstance(one, AnyArray) for one in value.values()):
        key, one = next(iter(value.items()))
        raise mismatch(file, "", f"has no tensors in {group}: {key!r} is a {pickles.kind_of(one)}", _BY_NAME)
    tensors, refused = [], []
    for name, array in value.items():
        try:
            if type(name) is int and str(name) in value:
                raise mismatch(file, str(name), f"has the number {name} and the text {str(name)!r} as names", _RENAMED)
            tensors.append(_entry(name, array, file, group))
        except Refused as error:
            refused.append(RefusedPart(str(name), error, group))
    return StateDict(tuple(tensors), tuple(refused))


def _entry(key: Any, array: Any, file: str, group: str) -> ForeignTensor:
    if type(key) not in (str, int):
        raise mismatch(file, str(key), f"has the key {key!r}, which is not a name", _RENAMED)
    name = str(key)
    if not isinstance(array, AnyArray):
        raise mismatch(file, name, f"has {name!r}, which is a {pickles.kind_of(array)}, not a tensor")
    if array.dtype == "U16" and (isinstance(array, LatinArray) or not array.storage):
        what = f"has {name!r}, a numpy array of U16: these may be bfloat16 values, which numpy writes as integers"
        raise mismatch(file, name, what, "save it as a torch tensor, of dtype torch.uint16 or torch.bfloat16")
    return tensor(array, group, name)


def plain(value: Any, file: str, key: str) -> Any:
    """The JSON of a plain Python value; `StateMismatch` for anything else."""

    def other(trail: json_values.Trail, inner: Any) -> Any:
        path = json_values.path_of((key, *trail))
        raise mismatch(
            file, path, f"has {path!r}, which is a {pickles.kind_of(inner)}: only tensors and plain values are kept"
        )

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

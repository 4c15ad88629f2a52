"""Checks that weights, masters and optimizer state of a directory are of one model, by names, shapes and types.

Each set of files is complete by its own index, even if one of them is of another model or save.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey

_WEIGHTS = ("model", "adapter")
_HALF = frozenset({"BF16", "F16"})
_FLOATS = frozenset({"F64", "F32", *_HALF})
_HINT = "the files may come from different saves: copy them again, or import them unchecked with --as-is"


def check(tensors: Mapping[TensorKey, ForeignTensor], tied: Collection[str], trained: bool) -> list[str]:
    """Notes for the report on missing parts. `tied` are names that may lack a weight of their own; `trained`: the directory
    has training files.

    Raises `StateMismatch` for state of an unknown parameter or with another shape, and for a parameter that lacks a part of
    the state that others have.
    """
    weights = {key.name: tensor for key, tensor in tensors.items() if key.group in _WEIGHTS}
    masters = {key.name for key in tensors if key.group == optimizer_state.MASTER_GROUP}
    moments: set[str] = set()
    for key, tensor in tensors.items():
        if key.group in _WEIGHTS:
            continue
        owner, _, kind = key.name.rpartition("/") if key.group == optimizer_state.GROUP else (key.name, "", "")
        if key.group == optimizer_state.GROUP:
            moments.add(owner)
        if kind != "step":
            _check_one(tensor, weights, owner, tied)
    half = {name for name, tensor in weights.items() if tensor.spec.dtype in _HALF}
    if masters and moments:
        _check_all(half & moments, masters, "optimizer state, but no master", "master")
        _check_all(half & masters, moments, "a master, but no optimizer state", "optim")
    return _missing(weights, masters, moments, trained, bool(half & moments))


def _check_one(tensor: ForeignTensor, weights: Mapping[str, ForeignTensor], owner: str, tied: Collection[str]) -> None:
    spec = tensor.spec
    if spec.dtype not in _FLOATS:
        raise StateMismatch(
            f"{spec.name!r} of group {spec.group} is {spec.dtype}, not floating-point", hint=_HINT, tensor=spec.name
        )
    if not weights or (owner in tied and owner not in weights):
        return
    if owner not in weights:
        raise StateMismatch(
            f"{spec.name!r} of group {spec.group} belongs to {owner!r}, for which the model has no weight",
            hint=_HINT,
            tensor=spec.name,
        )
    dtype, shape = weights[owner].spec.dtype, weights[owner].spec.shape
    if dtype not in _FLOATS:
        raise StateMismatch(f"the trained weight {owner!r} is {dtype}, not floating-point", hint=_HINT, tensor=owner)
    if spec.shape != shape:
        raise StateMismatch(
            f"{spec.name!r} of group {spec.group} has shape {list(spec.shape)}, but its weight has {list(shape)}",
            hint=_HINT,
            tensor=spec.name,
        )


def _check_all(names: Collection[str], present: Collection[str], what: str, group: str) -> None:
    lacking = min((name for name in names if name not in present), default=None)
    if lacking is not None:
        raise StateMismatch(f"{lacking!r} has {what}, unlike other parameters (group {group})", hint=_HINT, tensor=lacking)


def _missing(
    weights: Collection[str], masters: Collection[str], moments: Collection[str], trained: bool, half: bool
) -> list[str]:
    notes = []
    if not weights:
        notes.append("no file has model weights: group model is missing")
    if half and not masters:
        notes.append("no file has master copies of the half-precision weights: group master is missing")
    if weights and not moments and (masters or trained):
        notes.append("no file has optimizer state: group optim is missing")
    return notes

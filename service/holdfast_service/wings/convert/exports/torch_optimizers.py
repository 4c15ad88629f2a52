"""An optimizer as the state dict of torch, which numbers parameters in the order of its groups."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from holdfast_formats.errors import CheckpointError, NoSuchResource, StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_service.wings.convert.exports.ordered_tensors import arrange
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.foreign import json_values

ARGUMENTS = "training_args.json"  # of a Trainer, which the adapter stores
_ONLY_WEIGHTS = "export only the model with `--as hf`, or everything with `--as dcp`"


class NumberedOptimizer(NamedTuple):
    """A state dict with `MappedTensor` in place of tensors, its path in the checkpoint, its groups, and notes."""

    state_dict: dict[str, Any]
    path: str
    groups: frozenset[str]
    notes: tuple[str, ...]


def of(source: ExportSource) -> NumberedOptimizer:
    """The checkpoint's optimizer.

    Raises `NoSuchResource` without one, `StateMismatch` for several, and for state that torch's files cannot hold.
    """
    documents = source.listing.documents.get(optimizer_state.GROUP, {})
    if not documents:
        raise lacks("no optimizer", source)
    if len(documents) > 1:
        raise StateMismatch(f"the checkpoint has {len(documents)} optimizers, and a Trainer has one", hint=_ONLY_WEIGHTS)
    ((key, document),) = documents.items()
    arranged = arrange(source, None)
    tensors, masters = arranged.group(optimizer_state.GROUP), arranged.group(optimizer_state.MASTER_GROUP)
    try:
        held = json_values.decode(document, lambda _, name: tensors[name])
        groups = list(held["groups"].values())
        names = [name for group in groups for name in group["params"]]
        own = {name: kind for kind, listed in held["masters"].items() for name in listed}
        values, wrapped = held["state"], held.get("wrapped")
    except (CheckpointError, AttributeError, KeyError, TypeError) as error:
        raise StateMismatch(f"{optimizer_state.GROUP}/{key} cannot be read: {error}", hint=_ONLY_WEIGHTS) from error
    if wrapped:
        raise StateMismatch(
            f"the state of {min(wrapped)} is in wrapper tensors, such as quantised ones, which are classes in torch's files",
            hint=_ONLY_WEIGHTS,
        )
    if optimizer_state.is_numbered(document):
        groups = sorted(groups, key=lambda group: min(map(int, group["params"]), default=-1))
        names = [name for group in groups for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {numbers[name]: dict(kept) for name, kept in values.items() if name in numbers}
    for path, tensor in tensors.items():
        name, _, kind = path.rpartition("/")
        if name in numbers:
            state.setdefault(numbers[name], {})[kind] = tensor
    for name, kind in own.items():
        if name in masters and name in numbers:
            state.setdefault(numbers[name], {})[kind] = masters[name]
    how = {**optimizer_state.IMPLEMENTATION, **({"fused": True} if _is_fused(source) else {})}
    given = [{**how, **group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    copies = {optimizer_state.MASTER_GROUP} if own else set()
    notes = [f"optimizer.pt numbers {len(names)} parameters in the order of the optimizer that was saved"]
    return NumberedOptimizer(
        {"state": dict(sorted(state.items())), "param_groups": given},
        f"{optimizer_state.GROUP}/{key}",
        frozenset({optimizer_state.GROUP, *copies}),
        tuple(notes),
    )


def lacks(what: str, source: ExportSource) -> CheckpointError:
    """The error for a checkpoint from which no training resumes."""
    values = [f"{group}/{key}" for group, held in source.listing.documents.items() for key in held]
    return NoSuchResource(
        f"the checkpoint has {what}, without which a Trainer does not resume",
        hint=f"export the model with `--as hf`; the checkpoint's values are {', '.join(sorted(values)[:8]) or 'none'}",
    )


def _is_fused(source: ExportSource) -> bool:
    """Whether the Trainer's optimizer computes a step in one kernel, whose results differ in the last bit."""
    if ARGUMENTS not in source.assets:
        return False
    try:
        arguments = json.loads(source.read_asset(ARGUMENTS))
    except (ValueError, RecursionError):
        return False
    return isinstance(arguments, dict) and str(arguments.get("optim", "")).endswith("_fused")

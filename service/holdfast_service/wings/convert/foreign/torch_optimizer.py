"""The state dict of a torch optimizer, beside the model's in the same file, by the names of the parameters.

It numbers parameters in the optimizer's order, and has their names only if the optimizer was given them. Without names, one
group of as many parameters as the model has tensors, each with state of that tensor's shape, must be `model.parameters()` if
no two tensors have the same shape. Anything else could have another order, and keeps its numbers, which a restore resolves
by the live optimizer (`trainers.numbered_optimizers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats.errors import CheckpointError
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_service.wings.convert.foreign import json_values, torch_values
from holdfast_service.wings.convert.foreign.computed import scalar
from holdfast_service.wings.convert.foreign.pickles import AnyArray

_STATE, _GROUPS, _PARAMS, _NAMES = "state", "param_groups", "params", "param_names"
_HINT = (
    "save it with get_state_dict() of torch.distributed.checkpoint.state_dict, which stores parameter names, or give the "
    "optimizer model.named_parameters(); or remove it from the file and import only the weights"
)


class TorchOptimizer(NamedTuple):
    """The tensors and the document of an optimizer, and a note about assumptions."""

    tensors: tuple[ForeignTensor, ...]
    document: dict[str, Any]
    note: str


def is_state_dict(value: Any) -> bool:
    """Whether a value has the form of an optimizer's state dict."""
    return isinstance(value, dict) and value.keys() == {_STATE, _GROUPS}


def read(value: Mapping[str, Any], weights: Sequence[ForeignTensor], file: str, key: str) -> TorchOptimizer | None:
    """The optimizer under `key` of a file; None if its parameters have numbers, and their names are not certain.

    `StateMismatch` for state that torch does not write, and for names that the model lacks.
    """
    groups, state = value[_GROUPS], value[_STATE]
    fits = isinstance(groups, list) and isinstance(state, dict) and all(isinstance(held, dict) for held in state.values())
    if not fits or not all(isinstance(group, dict) and isinstance(group.get(_PARAMS), list) for group in groups):
        raise refused(file, key, "is not a state dict that torch writes")
    labels = [label for group in groups for label in group[_PARAMS]]
    by_name = bool(labels) and all(type(label) is str for label in labels)
    numbered = labels == list(range(len(labels))) and all(type(label) is int for label in state)
    if not (by_name or numbered) or len(state.keys() | set(labels)) != len(labels):
        raise refused(file, key, "neither names its parameters nor numbers them in order")
    note = ""
    if by_name:  # as get_state_dict() has it
        names = labels
    elif all(isinstance(group.get(_NAMES), list) for group in groups):
        names = [name for group in groups for name in group[_NAMES]]
    else:
        names = _in_order(len(groups), labels, state, weights)
        note = f"the parameters of {key} have no names: they were matched to the model's by order, count and shape"
    known = {tensor.spec.name: tensor for tensor in weights}
    certain = len(set(map(str, names))) == len(labels) and all(isinstance(name, str) and name in known for name in names)
    if not certain or len(names) != len(labels):
        if numbered:
            return None
        raise refused(file, key, "has duplicate parameters, or some that the model lacks")
    hyper = [
        {str(kind): torch_values.plain(one, file, key) for kind, one in group.items() if kind not in (_PARAMS, _NAMES)}
        for group in groups
    ]
    name_of = dict(zip(labels, names, strict=True))
    state_document = optimizer_state.document(
        [([name_of[label] for label in group[_PARAMS]], kept) for group, kept in zip(groups, hyper, strict=True)]
    )
    tensors = _placed({known[name_of[label]]: state[label] for label in labels if label in state}, state_document, file, key)
    return TorchOptimizer(tuple(tensors), state_document, note)


def _in_order(
    groups: int, numbers: Sequence[int], state: Mapping[int, Mapping[Any, Any]], weights: Sequence[ForeignTensor]
) -> list[str]:
    """The names of the parameters, if they are certainly those of the model in its order; none otherwise."""
    own = {tensor.pieces: tensor for tensor in reversed(weights)}  # tied ones are one parameter, by its first name
    single = [tensor for tensor in weights if own[tensor.pieces] is tensor]
    shapes = {tensor.spec.shape for tensor in single}
    if groups != 1 or len(single) != len(numbers) or (state and len(shapes) != len(single)):
        return []
    for number, tensor in enumerate(single if state else ()):
        held = state.get(number, {}).values()
        if not any(isinstance(one, AnyArray) and one.shape == tensor.spec.shape for one in held):
            return []
    return [tensor.spec.name for tensor in single]


def _placed(
    state: Mapping[ForeignTensor, Mapping[Any, Any]], document: dict[str, Any], file: str, key: str
) -> list[ForeignTensor]:
    """The tensors of the state; other values go into the document."""
    tensors: list[ForeignTensor] = []
    kept: dict[str, Any] = {}
    masters: dict[str, list[str]] = {}
    for weight, held in state.items():
        name = weight.spec.name
        for kind, value in held.items():
            if not isinstance(kind, str) or not kind or "/" in kind:
                raise refused(file, key, f"has state {kind!r}, a name that a checkpoint cannot store")
            if kind == "step" and type(value) in (int, float) and float(np.float32(value)) == value:
                tensors.append(scalar(TensorKey(optimizer_state.GROUP, f"{name}/step"), float(value)))
            elif not isinstance(value, AnyArray):
                kept.setdefault(name, {})[kind] = torch_values.plain(value, file, key)
            elif kind in optimizer_state.MASTER_KEYS and value.shape == weight.spec.shape:
                masters.setdefault(kind, []).append(name)
                tensors.append(torch_values.tensor(value, optimizer_state.MASTER_GROUP, name))
            else:
                tensors.append(torch_values.tensor(value, optimizer_state.GROUP, f"{name}/{kind}"))
    document["state"] = json_values.ordered({name: json_values.ordered(values) for name, values in kept.items()})
    document["masters"] = json_values.ordered(masters)
    return tensors


def refused(file: str, key: str, what: str) -> CheckpointError:
    return torch_values.mismatch(file, key, f"has the optimizer {key!r}, which {what}", _HINT)

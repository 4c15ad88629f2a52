"""State dicts of torch optimizers that number their parameters, stored by these numbers.

The files have no names: which parameter has a number follows from the program that made the optimizer, through a Trainer's
groups for example. A restore takes the names from the live optimizer (`holdfast.tensors.numbered_parameters`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats import dtypes
from holdfast_formats.errors import CheckpointError
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_service.wings.convert.foreign import json_values, torch_optimizer, torch_values
from holdfast_service.wings.convert.foreign.computed import scalar
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing, Unread, ValuePlace
from holdfast_service.wings.convert.foreign.pickles import AnyArray, PickledArray

KEY = "optim"  # of the adapters' optimizers
STEP = "step"
_GROUPS, _STATE, _PARAMS, _NAMES = "param_groups", "state", "params", "param_names"
_ADAM = frozenset({STEP, "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})  # torch's, whose step is a tensor since 1.12


class HeldOptimizer(NamedTuple):
    """An optimizer's state dict, and its file."""

    value: Any
    file: str


def add(
    gathered: GatheredListing, held: Sequence[HeldOptimizer], weights: Sequence[ForeignTensor], key: str, label: str = ""
) -> None:
    """Add these optimizers, if there are any, as the document `key`: a single one by the names of its parameters, if these
    are certain, else by their numbers. `label` is its key in the file. Raises as `torch_optimizer.read` and `collect`.
    """
    named = torch_optimizer.read(held[0].value, weights, held[0].file, label or key) if len(held) == 1 else None
    if named is not None:
        gathered.tensors.update((tensor.key, tensor) for tensor in named.tensors)
        gathered.document(optimizer_state.GROUP, key, named.document)
        gathered.notes.extend([named.note] if named.note else [])
    elif held:
        collect(gathered, held, key)


def collect(gathered: GatheredListing, held: Sequence[HeldOptimizer], key: str = KEY) -> int | None:
    """Add the tensors and the document `key` of these optimizers, numbered one after the other.

    Returns the most steps that a parameter has taken, if the state counts them. `StateMismatch` for anything that torch
    does not write.
    """
    groups: list[tuple[list[str], Mapping[str, Any]]] = []
    numbered, first = _Numbered(gathered, key), 0
    for value, file in held:
        if not torch_optimizer.is_state_dict(value):
            raise _refused(file, "is not a state dict that torch writes")
        labels = _labels(value, file)
        for group in value[_GROUPS]:
            place = ValuePlace(file, optimizer_state.GROUP, f"{key}/groups/{len(groups)}")
            hyper = {str(k): numbered.json(one, place, str(k)) for k, one in group.items() if k not in (_PARAMS, _NAMES)}
            groups.append(([str(first + label) for label in group[_PARAMS]], hyper))
        for label, kept in value[_STATE].items():
            numbered.add(str(first + label), kept, file)
        first += len(labels)
    document = {**optimizer_state.document(groups), optimizer_state.NUMBERED: True}
    document["state"] = json_values.ordered({name: json_values.ordered(held) for name, held in numbered.values.items()})
    document["masters"] = json_values.ordered(numbered.masters)
    gathered.document(optimizer_state.GROUP, key, document)
    if first:
        gathered.notes.append(
            f"the optimizer numbers its {first} parameters: a restore gives them the names of the live optimizer's, in order"
        )
    return numbered.steps


class _Numbered:
    """Collects the state of parameters by number."""

    def __init__(self, gathered: GatheredListing, key: str) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self.masters: dict[str, list[str]] = {}
        self.steps: int | None = None
        self._gathered, self._key = gathered, key

    def add(self, number: str, kept: Mapping[Any, Any], file: str) -> None:
        for kind, value in kept.items():
            if not isinstance(kind, str) or not kind or "/" in kind:
                raise _refused(file, f"has state {kind!r}, a name that a checkpoint cannot store")
            if kind == STEP:
                self._count(value)
            if type(value) in (int, float) and kind == STEP and kept.keys() <= _ADAM and float(np.float32(value)) == value:
                step = scalar(TensorKey(optimizer_state.GROUP, f"{number}/{kind}"), float(value))
                self._gathered.tensors[step.key] = step
            elif not isinstance(value, AnyArray):
                place = ValuePlace(file, optimizer_state.GROUP, f"{self._key}/state/{number}")
                self.values.setdefault(number, {})[kind] = self.json(value, place, kind)
            elif kind in optimizer_state.MASTER_KEYS:
                self.masters.setdefault(kind, []).append(number)
                self._array(value, optimizer_state.MASTER_GROUP, number)
            else:
                self._array(value, optimizer_state.GROUP, f"{number}/{kind}")

    def json(self, value: Any, place: ValuePlace, kind: str) -> Any:
        made = self._gathered.json(value, place._replace(prefix=f"{place.prefix}/{kind}"))
        if isinstance(made, Unread):
            raise _refused(place.file, f"has {kind!r}, which cannot be kept: {made.reason}")
        return made

    def _array(self, array: AnyArray, group: str, name: str) -> None:
        tensor = torch_values.tensor(array, group, name)
        self._gathered.add(tensor.spec, tensor.pieces, tensor.decoder)

    def _count(self, value: Any) -> None:
        if isinstance(value, PickledArray) and value.shape == () and value.dtype in dtypes.FLOATS:
            data = self._gathered.files.read(value.file, value.offset, dtypes.bits(value.dtype) // 8)
            value = float(np.frombuffer(data, dtypes.to_numpy(value.dtype))[0]) if data else 0.0
        if type(value) in (int, float) and value >= 0 and float(value).is_integer():
            self.steps = max(self.steps or 0, int(value))


def _labels(value: Mapping[str, Any], file: str) -> list[int]:
    """The numbers of all parameters; `StateMismatch` unless they count from 0, and state belongs to them."""
    groups, state = value[_GROUPS], value[_STATE]
    if not isinstance(groups, list) or not isinstance(state, dict):
        raise _refused(file, "is not a state dict that torch writes")
    if not all(isinstance(group, dict) and isinstance(group.get(_PARAMS), list) for group in groups):
        raise _refused(file, "is not a state dict that torch writes")
    labels = [label for group in groups for label in group[_PARAMS]]
    known = set(range(len(labels)))
    if labels != list(range(len(labels))) or not all(type(label) is int for label in (*labels, *state)):
        raise _refused(file, "does not number its parameters in order")
    if not state.keys() <= known or not all(isinstance(kept, dict) for kept in state.values()):
        raise _refused(file, "has state of parameters that are in none of its groups")
    return labels


def _refused(file: str, what: str) -> CheckpointError:
    return torch_values.mismatch(file, "", f"holds an optimizer that {what}")

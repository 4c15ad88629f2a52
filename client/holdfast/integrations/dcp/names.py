"""The names of a DCP state dict, and where Holdfast stores what they name.

DCP flattens a state dict: each tensor and each value has a path of keys, and the keys, joined with dots, are its name.

    path                                       group    name
    model, …  (also master, ema)               the key  the rest, joined with dots
    optim*, state, <parameter>, <key>          optim    <parameter>/<key>
    any other tensor under k                   extra    k, k/<rest>
    values under optim*                        optim    the document of `holdfast.state.optimizers`, under the key
    other values                               extra    a nested JSON document, under the first key

An optimizer has the form in which `get_state_dict` returns it, nested or flattened. Another form, or a second optimizer,
goes to `extra`. So a Checkpointer reads what DCP saved, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from holdfast.state.hyper_parameters import IMPLEMENTATION
from holdfast.state.modules import EMA, MODEL
from holdfast.state.train_state import EXTRA, MASTER, OPTIM
from holdfast.tensors import trees
from holdfast.tensors.leaves import Key
from holdfast_formats.errors import InvalidRequest

Path = tuple[str | int, ...]

WHOLE = (MODEL, MASTER, EMA)  # keys under which a flat mapping of tensors is a group of its own
_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


class NamedContents(NamedTuple):
    """Contents of a state dict under Holdfast's names.

    `tensors` maps DCP names to stored ones. `values` are JSON texts, `arrays` the NumPy arrays they refer to, as
    tensors.
    """

    tensors: dict[str, Key]
    values: dict[Key, str]
    arrays: dict[Key, torch.Tensor]


def groups_of(first_keys: Iterable[str]) -> frozenset[str]:
    groups = {key if key in WHOLE else OPTIM for key in first_keys if key in WHOLE or key.startswith(OPTIM)}
    return frozenset({EXTRA, *groups})


class Naming:
    def __init__(self) -> None:
        self.found = NamedContents({}, {}, {})
        self._names: dict[int, str] = {}  # id of a placeholder -> the DCP name of its tensor
        self._nested: dict[str | int, Any] = {}

    def tensor(self, fqn: str, path: Path) -> None:
        """A tensor of the state dict, whether or not this rank writes any of it."""
        stand_in = torch.empty(0, device="cpu")
        self._names[id(stand_in)] = fqn
        _put(self._nested, path, stand_in)

    def value(self, path: Path, value: Any) -> None:
        _put(self._nested, path, value)

    def finish(self) -> NamedContents:
        """Raise `InvalidRequest`, with the path, for a value that JSON cannot express and for duplicate names."""
        documents = {
            key: optimizer_parts
            for key, value in self._nested.items()
            if str(key).startswith(OPTIM) and (optimizer_parts := optimizer_document(value, self._is_tensor)) is not None
        }
        if len(documents) > 1:  # two optimizers may have parameters of the same names
            documents = {}
        for key, value in self._nested.items():
            if not isinstance(key, str) or not key or key == "ranks":
                raise InvalidRequest(f"the key {key!r} of the state dict is reserved", hint="give it another name")
            if key in documents:
                self._take_optimizer(key, documents[key])
            elif key in WHOLE and isinstance(value, dict):
                self._take_group(key, value)
            else:
                self._take_extra(key, value)
        self._refuse_doubles()
        return self.found

    def _take_optimizer(self, key: str, optimizer_parts: OptimizerParts) -> None:
        for name, stand_in in optimizer_parts.tensors.items():
            self.found.tensors[self._names[id(stand_in)]] = OPTIM, name
        self._take_tree(OPTIM, key, trees.grow(optimizer_parts.document, key, key))

    def _take_group(self, group: str, held: Mapping[Any, Any]) -> None:
        for path, value in _leaves(held, self._is_tensor):
            name = dotted(path)
            if self._is_tensor(value):
                self.found.tensors[self._names[id(value)]] = group, name
            else:
                self._take_tree(group, name, trees.grow(value, f"{group}.{name}", name))

    def _take_extra(self, key: str, value: Any) -> None:
        flat = isinstance(value, dict) and bool(value) and all(name and self._is_tensor(t) for name, t in value.items())
        if "/" in key or not (flat or self._is_tensor(value)):
            self._take_tree(EXTRA, key, trees.grow(value, key, key))
            return
        named = {f"{key}/{name}": stand_in for name, stand_in in value.items()} if flat else {key: value}
        for name, stand_in in named.items():
            self.found.tensors[self._names[id(stand_in)]] = EXTRA, name

    def _take_tree(self, group: str, key: str, tree: trees.Tree) -> None:
        self.found.values[group, key] = tree.text
        for name, tensor in tree.tensors.items():
            fqn = self._names.get(id(tensor))
            if fqn is not None:
                self.found.tensors[fqn] = group, name
            elif isinstance(tensor, torch.Tensor):
                self.found.arrays[group, name] = tensor

    def _refuse_doubles(self) -> None:
        seen: dict[Key, str] = {}
        for fqn, key in self.found.tensors.items():
            if seen.setdefault(key, fqn) != fqn or key in self.found.arrays:
                raise InvalidRequest(
                    f"{fqn} and {seen[key]} would both be stored as {'/'.join(key)}", hint="give one of them another name"
                )

    def _is_tensor(self, value: object) -> bool:
        return id(value) in self._names


class OptimizerParts(NamedTuple):
    document: dict[str, Any]
    tensors: dict[str, Any]


def optimizer_document(held: Any, is_tensor: Callable[[object], bool]) -> OptimizerParts | None:
    """The document of a state dict in a form of `get_state_dict`; None for anything else."""
    if not isinstance(held, dict) or not all(isinstance(key, str) for key in held):
        return None
    nested = held if held.keys() == {_STATE, _GROUPS} else _unflattened(held)
    if nested is None or not _is_optimizer(nested):
        return None
    document: dict[str, Any] = {"groups": {}, "state": {}, "masters": {}, "kinds": {}}
    for position, group in enumerate(nested[_GROUPS]):
        document["groups"][group[_PARAMS][0] if group[_PARAMS] else f"#{position}"] = group
    tensors: dict[str, Any] = {}
    for name, kept in nested[_STATE].items():
        for key, value in kept.items():
            if is_tensor(value):
                tensors[f"{name}/{key}"] = value
            elif any(is_tensor(leaf) for _, leaf in _leaves({key: value}, is_tensor)):
                return None  # tensors inside of other values have no name in the group
            else:
                document["state"].setdefault(name, {})[key] = value
    return OptimizerParts(document, tensors)


def _is_optimizer(nested: Mapping[str, Any]) -> bool:
    state, groups = nested[_STATE], nested[_GROUPS]
    if not isinstance(state, dict) or not isinstance(groups, list):
        return False
    if not all(isinstance(group, dict) and isinstance(group.get(_PARAMS), list) for group in groups):
        return False
    params = [name for group in groups for name in group[_PARAMS]]
    known = set(params) if all(isinstance(name, str) and name for name in params) else set()
    firsts = len({group[_PARAMS][0] for group in groups if group[_PARAMS]}) == sum(bool(g[_PARAMS]) for g in groups)
    kept = all(isinstance(values, dict) and all(k and "/" not in k for k in values) for values in state.values())
    return len(known) == len(params) and firsts and kept and state.keys() <= known


def _unflattened(held: Mapping[str, Any]) -> dict[str, Any] | None:
    """The nested form of a flattened document; parameters with equal hyper-parameters form a group."""
    state: dict[str, dict[str, Any]] = {}
    hyper: dict[str, dict[str, Any]] = {}
    for joined, value in held.items():
        first, _, rest = joined.partition(".")
        name, _, key = rest.rpartition(".")
        if first not in (_STATE, _GROUPS) or not name:
            return None
        (state if first == _STATE else hyper).setdefault(name, {})[key] = value
    groups: list[dict[str, Any]] = []
    for name, values in hyper.items():
        alike = next((group for group in groups if _alike(group, values)), None)
        if alike is None:
            groups.append({_PARAMS: [name], **values})
        else:
            alike[_PARAMS].append(name)
    return {_STATE: state, _GROUPS: groups}


def _alike(group: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    if group.keys() - {_PARAMS} != values.keys():
        return False
    return all(
        group[key] is value or (not isinstance(value, torch.Tensor) and repr(group[key]) == repr(value))
        for key, value in values.items()
    )


def flattened_hyper(held: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a nested optimizer under the joined names of the flattened form."""
    return {
        f"{_GROUPS}.{name}.{key}": value
        for group in held[_GROUPS]
        for name in group[_PARAMS]
        for key, value in group.items()
        if key != _PARAMS
    }


def is_implementation(fqn: str) -> bool:
    """Whether a name is a hyper-parameter of the step's implementation, which a Checkpointer does not store."""
    head, _, key = fqn.rpartition(".")
    return f".{_GROUPS}." in f".{head}." and key in IMPLEMENTATION - {_PARAMS}


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def flattened(nested: Mapping[str, Any], is_tensor: Callable[[object], bool]) -> dict[str, tuple[Path, Any]]:
    return {dotted(path): (path, value) for path, value in _leaves(nested, is_tensor)}


def _leaves(value: Any, is_tensor: Callable[[object], bool], path: Path = ()) -> list[tuple[Path, Any]]:
    """The leaves as DCP finds them since torch 2.4: it enters mappings, and lists that contain tensors or mappings."""
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, is_tensor, (*path, str(key)))]
    if type(value) is list and not _is_terminal(value, is_tensor):
        return [leaf for position, item in enumerate(value) for leaf in _leaves(item, is_tensor, (*path, position))]
    return [(path, value)]


def _is_terminal(items: list[Any], is_tensor: Callable[[object], bool]) -> bool:
    return not any(
        isinstance(item, Mapping) or is_tensor(item) or (type(item) is list and not _is_terminal(item, is_tensor))
        for item in items
    )


def _put(nested: dict[str | int, Any], path: Path, value: Any) -> None:
    """Set a value at its path; lists grow as needed. `InvalidRequest` for contradictory paths."""
    at: Any = nested
    for position, key in enumerate(path):
        if isinstance(key, int) and isinstance(at, list):
            at.extend([None] * (key + 1 - len(at)))
            inner = at[key]
        elif isinstance(key, str) and isinstance(at, dict):
            inner = at.get(key)
        else:
            raise InvalidRequest(f"the planner's path for {dotted(path)!r} conflicts with the path of another name")
        if position + 1 == len(path):
            inner = value
        elif inner is None:
            inner = [] if isinstance(path[position + 1], int) else {}
        at[key], at = inner, inner

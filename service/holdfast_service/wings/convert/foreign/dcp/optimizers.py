"""The state of an optimizer in a DCP state dict, by the names of the parameters.

`get_state_dict` nests it (`optim.state.NAME.exp_avg`, `optim.param_groups.0.lr`), and flattened it has joined keys, of which
each parameter has its hyper-parameters (`optimizer.param_groups.NAME.lr`), as torchtitan does.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from holdfast_service.wings.convert.foreign.dcp.metadata import Path

STATE, _GROUPS, PARAMS = "state", "param_groups", "params"
JOINED_GROUPS = f"{_GROUPS}."
JOINED = (f"{STATE}.", JOINED_GROUPS)  # how flattened keys begin


class SavedOptimizer(NamedTuple):
    """The entries of one optimizer: its state of each parameter by kind, and its groups' hyper-parameters by kind, all as
    keys of the state dict. Without a key for `params` a group is that of the parameter in `names`.
    """

    state: Mapping[str, Mapping[str, str]]
    groups: tuple[Mapping[str, str], ...]
    names: tuple[str, ...]


def parsed(entries: Iterable[tuple[Path, str]], weights: Collection[str]) -> SavedOptimizer | str:
    """The optimizer whose entries have these paths and keys, below its own; or the reason why there is none.

    `weights` are the names of the model's parameters.
    """
    state: dict[str, dict[str, str]] = {}
    nested: dict[int, dict[str, str]] = {}
    joined: dict[str, dict[str, str]] = {}
    for path, fqn in entries:
        head, *rest = path
        if head == STATE and len(rest) == 2:
            state.setdefault(str(rest[0]), {})[str(rest[1])] = fqn
        elif head == _GROUPS and len(rest) == 2 and isinstance(rest[0], int):
            nested.setdefault(rest[0], {})[str(rest[1])] = fqn
        elif not rest and isinstance(head, str) and head.startswith(JOINED):
            part, _, inner = head.partition(".")
            name, kind = _split(inner, weights)
            (state if part == STATE else joined).setdefault(name, {})[kind] = fqn
        else:
            return f"{fqn} is not an entry of an optimizer's state dict"
    if any("/" in kind or not kind for kinds in state.values() for kind in kinds):
        return "the name of one of its states cannot be stored in a checkpoint"
    if state and all(name.isdigit() for name in state):
        return "its state uses parameter numbers instead of names: save with get_state_dict()"
    if nested and joined:
        return "its parameter groups are stored in two forms"
    if sorted(nested) != list(range(len(nested))) or any(PARAMS not in group for group in nested.values()):
        return "a parameter group lacks its parameters"
    if nested:
        return SavedOptimizer(state, tuple(nested[position] for position in sorted(nested)), ())
    return SavedOptimizer(state, tuple(joined.values()), tuple(joined))


def owner(joined: str, weights: Collection[str]) -> str:
    """The parameter of a flattened key."""
    return _split(joined.partition(".")[2], weights)[0]


def grouped(names: Iterable[str], hyper: Iterable[Mapping[str, Any]]) -> list[tuple[list[str], Mapping[str, Any]]]:
    """Parameters with equal hyper-parameters, which are JSON values, as one group."""
    by_values: dict[str, tuple[list[str], Mapping[str, Any]]] = {}
    for name, values in zip(names, hyper, strict=True):
        by_values.setdefault(json.dumps(values, sort_keys=True), ([], values))[0].append(name)
    return list(by_values.values())


def _split(inner: str, weights: Collection[str]) -> tuple[str, str]:
    """Split a parameter's name and the kind, joined with a dot; the kind may contain dots."""
    name, _, kind = inner.rpartition(".")
    while name not in weights:
        name, _, more = name.rpartition(".")
        if not name:
            first, _, last = inner.rpartition(".")
            return first, last
        kind = f"{more}.{kind}"
    return name, kind

"""What is no model and no optimizer: schedulers, data loaders, counters. It all lands in the group `extra`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast_formats.errors import InvalidRequest

from . import trees
from .fragments import Storable, is_dtensor
from .json_values import referred
from .leaves import RANK_PREFIX, Content, Plan, Selection, Stored

GROUP = "extra"


class Stateful(NamedTuple):
    """An object with `state_dict` and `load_state_dict`. Its tensors are this rank's own, except DTensors and Fragments."""

    key: str
    target: Any
    rank: int

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        _collect(content, self.key, self._tree())

    def plan(self, stored: Stored, selection: Selection) -> Plan:
        """Want the stored document and its tensors, in new memory: the object gets them in `load_state_dict`."""
        return _plan(self.key, stored, selection, self._shards, self.target.load_state_dict)

    def _tree(self) -> trees.Tree:
        return trees.grow(self.target.state_dict(), self.key, self.key, f"{RANK_PREFIX}{self.rank:05d}/{self.key}")

    def _shards(self, names: frozenset[str]) -> Mapping[str, Storable]:
        """For the names that are not one rank's, memory laid out as the live object's: only that says how it is sharded."""
        if all(name.startswith(RANK_PREFIX) for name in names):
            return {}
        live = self._tree().tensors
        return {name: torch.empty_like(value) for name, value in live.items() if is_dtensor(value)}  # type: ignore[arg-type]


class Value(NamedTuple):
    """A nested plain value, perhaps with tensors: restored in place where it can be, else put into the state mapping."""

    key: str
    state: Mapping[str, Any]

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        _collect(content, self.key, trees.grow(self.state[self.key], self.key, self.key))

    def plan(self, stored: Stored, selection: Selection) -> Plan:
        """Want the stored document; live tensors at the same places are filled, live dicts, lists and arrays kept."""

        if selection.takes(GROUP, self.key):
            self._check_installable()
        live = trees.grow(self.state[self.key], self.key, self.key).tensors
        plan = _plan(self.key, stored, selection, lambda _: live, self._install)
        if plan.documents and stored.value(*plan.documents[0]) is not None:
            offered = {leaf.name for leaf in plan.wanted}
            plan.missing += [
                f"{GROUP}/{name}" for name in live if name not in offered and f"{GROUP}/{name}" not in plan.missing
            ]
        return plan

    def _check_installable(self) -> None:
        """Refuse, before anything is touched, a value that nobody could be given back."""
        if not isinstance(self.state, MutableMapping) and not isinstance(self.state[self.key], dict | list | np.ndarray):
            raise InvalidRequest(
                f"{self.key}: a plain {type(self.state[self.key]).__name__} cannot be put into a state that is read-only",
                hint="hand over the state as a dict, or wrap the value in a dict or list",
            )

    def _install(self, value: Any) -> None:
        live = self.state[self.key]
        if type(live) is type(value) is dict:
            live.clear()
            live.update(value)
        elif type(live) is type(value) is list:
            live[:] = value
        elif isinstance(live, np.ndarray) and isinstance(value, np.ndarray) and _same_form(live, value):
            live[...] = value
        elif isinstance(self.state, MutableMapping):
            self.state[self.key] = value


def _install(install: Callable[[Any], object], regrown: trees.Regrown) -> None:
    install(regrown.build())


def _same_form(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.flags.writeable


def _collect(content: Content, key: str, tree: trees.Tree) -> None:
    content.add_value(GROUP, key, tree.text)
    for name, tensor in tree.tensors.items():
        content.add(GROUP, name, tensor)


def _plan(
    key: str,
    stored: Stored,
    selection: Selection,
    live: Callable[[frozenset[str]], Mapping[str, Storable]],
    install: Callable[[Any], object],
) -> Plan:
    plan = Plan()
    text = stored.value(GROUP, key)
    if not selection.takes(GROUP, key):
        plan.claimed.update((GROUP, name) for name in stored.specs.get(GROUP, {}) if name.startswith(f"{key}/"))
        return plan
    plan.documents.append((GROUP, key))
    if text is None:
        return plan
    held = live(frozenset(referred(text)))
    regrown = trees.regrow(text, key, partial(stored.spec, GROUP), held)
    plan.missing += [f"{GROUP}/{name}" for name in regrown.unknown]
    for name, tensor in regrown.tensors.items():
        plan.want(GROUP, name, tensor)
    if not regrown.unknown:
        plan.actions.append(partial(_install, install, regrown))
    return plan

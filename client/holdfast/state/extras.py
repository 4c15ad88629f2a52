"""Entries that are neither model nor optimizer: schedulers, data loaders, counters. They all go to the group `extra`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.state.containers import ContainerKeeper, can_take, is_mutable
from holdfast.state.hyper_parameters import keep_settings, refuse_unlike
from holdfast.state.streams import CheckedEntry
from holdfast.tensors import json_values, trees
from holdfast.tensors.fragments import Fragment, FragmentList, Storable, is_sharded, objects
from holdfast.tensors.json_values import referred
from holdfast.tensors.leaves import RANK_PREFIX, Content, OfferedLeaves, PartPlan, Selection
from holdfast_formats.errors import InvalidRequest

GROUP = "extra"


class Stateful(NamedTuple):
    """An object with `state_dict` and `load_state_dict`. Its tensors are this rank's own, except DTensors and Fragments.

    An object that is `only_ours` keeps its present state if the checkpoint of another program has none.
    """

    key: str
    target: Any
    rank: int

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        _collect(content, self.key, self._tree())

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Want the stored document and its tensors, in new memory: the object gets them in `load_state_dict`."""
        text = stored.value(GROUP, self.key)
        if text is None and stored.imported and getattr(self.target, "only_ours", False):
            return PartPlan(notes=[f"the imported checkpoint has no {GROUP}/{self.key}, which only Holdfast stores"])
        note = None
        if text is not None and selection.takes(GROUP, self.key) and isinstance(self.target, CheckedEntry | LRScheduler):
            value = json_values.loads(text, self.key, lambda kind, name: torch.empty(0), made=False)
            if isinstance(self.target, CheckedEntry):
                self.target.refuse_unfit(value)
            else:
                refuse_unlike(self.key, self.target, value)
                note = keep_settings(self.key, self.target, value, selection)
        plan = _plan(self.key, stored, selection, self._shards, partial(self._load, selection))
        plan.notes += [] if note is None else [note]
        return plan

    def _load(self, selection: Selection, value: Any) -> None:
        if isinstance(self.target, LRScheduler):
            keep_settings(self.key, self.target, value, selection)
        self.target.load_state_dict(value)

    def _tree(self) -> trees.Tree:
        return trees.grow(self.target.state_dict(), self.key, self.key, f"{RANK_PREFIX}{self.rank:05d}/{self.key}")

    def _shards(self, names: frozenset[str]) -> Mapping[str, Storable]:
        """Memory for names shared between ranks, shaped as in the live object, which alone has the sharding."""
        if all(name.startswith(RANK_PREFIX) for name in names):
            return {}
        live = self._tree().tensors
        return {name: _like(value) for name, value in live.items() if is_sharded(value)}


class Value(NamedTuple):
    """A nested plain value, perhaps with tensors. It is restored into the live containers, arrays and tensors, or replaces
    them. Every save reads the state's mapping again.
    """

    key: str
    state: Mapping[str, Any]
    keeper: ContainerKeeper

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    def collect(self, content: Content) -> None:
        _collect(content, self.key, trees.grow(self.state[self.key], self.key, self.key))

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Want the stored document. Live tensors at the same places are filled, and mutable objects there stay the same
        objects.
        """
        live = trees.grow(self.state[self.key], self.key, self.key).tensors
        plan = _plan(self.key, stored, selection, lambda _: _filled(live), self._install)
        text = stored.value(GROUP, self.key)
        if text is not None and selection.takes(GROUP, self.key):
            self._check_installable(
                json_values.loads(text, self.key, lambda kind, _: np.empty(0) if kind == "array" else None, made=False)
            )
            offered = {leaf.name for leaf in plan.wanted} | {name for name in live if not selection.takes(GROUP, name)}
            plan.missing += [
                f"{GROUP}/{name}" for name in live if name not in offered and f"{GROUP}/{name}" not in plan.missing
            ]
        return plan

    def _check_installable(self, value: Any) -> None:
        """Refuse, before anything changes, a value that cannot be installed. Of an array, only the form is compared."""
        live = self.state[self.key]
        if isinstance(live, np.ndarray) and isinstance(value, np.ndarray):
            fits = live.flags.writeable
        else:
            fits = is_mutable(live) and can_take(live, value)
        if not (fits or isinstance(self.state, MutableMapping)):
            raise self._read_only(value)

    def _read_only(self, value: Any) -> InvalidRequest:
        return InvalidRequest(
            f"{self.key}: a plain {type(value).__name__} cannot be restored into a read-only state",
            hint="pass the state as a dict, or wrap the value in a dict or list",
        )

    def _install(self, value: Any) -> None:
        live = self.state[self.key]
        kept = self.keeper.put(live, value, self.key)
        if kept is not live:
            if not isinstance(self.state, MutableMapping):
                raise self._read_only(value)
            self.state[self.key] = kept


def _filled(live: Mapping[str, Storable]) -> dict[str, Storable]:
    """The memory to fill, by name: the live tensor's own, or new memory in two cases.

    The first is a tensor that is in the state more than once. The second is a name that several keys share (1 and "1"),
    which is assigned by their order.
    """
    times = Counter(frozenset(objects(value)) for value in live.values())
    bases = {name: base for name in live if (base := name.rpartition("~")[0]) in live}
    shared = {*bases, *bases.values()}
    return {
        name: _like(value) if times[frozenset(objects(value))] > 1 or name in shared else value
        for name, value in live.items()
    }


def _like(value: Storable) -> Storable:
    if isinstance(value, FragmentList):
        return value.with_new_memory()
    return value.with_tensor(value.tensor.detach().clone()) if isinstance(value, Fragment) else value.detach().clone()


def _install(install: Callable[[Any], object], regrown: trees.Regrown) -> None:
    install(regrown.build())


def _collect(content: Content, key: str, tree: trees.Tree) -> None:
    content.add_value(GROUP, key, tree.text)
    for name, tensor in tree.tensors.items():
        content.add(GROUP, name, tensor)


def _plan(
    key: str,
    stored: OfferedLeaves,
    selection: Selection,
    live: Callable[[frozenset[str]], Mapping[str, Storable]],
    install: Callable[[Any], object],
) -> PartPlan:
    plan = PartPlan()
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
        if name in held and not selection.takes(GROUP, name):
            plan.claimed.add((GROUP, name))  # ignored: the value is built with the live tensor
        else:
            plan.want(GROUP, name, tensor)
    if not regrown.unknown:
        plan.actions.append(partial(_install, install, regrown))
    return plan

"""Saves plain numbers that optimizers and their wrappers count in attributes, such as the cycle count of a Lookahead.

A number counts as changed once its value differed from the first look. So constant options are neither saved nor restored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from holdfast.left_out import LeftOutNote
from holdfast.state import optimizer_wrappers
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.tensors import trees
from holdfast.tensors.leaves import RANK_PREFIX, Content, OfferedLeaves, PartPlan, Selection
from holdfast_formats.errors import CorruptManifest

GROUP = "extra"
_KINDS = frozenset({int, float, bool})
_OF_TORCH = frozenset({"_step_count", "_opt_called"})  # schedulers of torch leave these in an optimizer


class _Named(NamedTuple):
    """An attribute of an object and its name in the checkpoint."""

    owner: object
    attribute: str


class WrapperNumbers:
    """Counters in attributes of the optimizers under one key, and of their wrappers. It lives as long as the state."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._first: dict[tuple[int, str], tuple[object, object]] = {}  # owner (kept alive) and value at the first look
        self._changed: set[tuple[int, str]] = set()

    def look(self, value: object) -> dict[str, _Named]:
        """Look again; the numbers that have changed since the first look, by their names in the checkpoint."""
        named: dict[str, _Named] = {}
        for name, one in self._named(value):
            now, place = getattr(one.owner, one.attribute), (id(one.owner), one.attribute)
            if _token(self._first.setdefault(place, (one.owner, _kept(now)))[1]) != _token(_kept(now)):
                self._changed.add(place)
            if place in self._changed:
                named[name] = one
        return named

    def put(self, value: object, numbers: Mapping[str, Any]) -> None:
        """Restore the objects' numbers, which from then on count as changed."""
        named = dict(self._named(value))
        for name, number in numbers.items():
            owner, attribute = named[name]
            live = getattr(owner, attribute)
            if isinstance(live, torch.Tensor):
                with torch.no_grad():
                    live.copy_(number)
            else:
                setattr(owner, attribute, number)
            self._changed.add((id(owner), attribute))

    def names(self, value: object) -> frozenset[str]:
        return frozenset(name for name, _ in self._named(value))

    def _named(self, value: object) -> Iterator[tuple[str, _Named]]:
        for name, owner in owners(value):
            for attribute, held in getattr(owner, "__dict__", {}).items():
                if attribute not in _OF_TORCH and is_number(held):
                    yield f"{name}.{attribute}", _Named(owner, attribute)


class NamedOwner(NamedTuple):
    """An optimizer, or a wrapper, and its class name, numbered if several are of one class."""

    name: str
    owner: object


def owners(value: object) -> Iterator[NamedOwner]:
    """The optimizers of an entry, and their wrappers."""
    if isinstance(value, OptimizerShards):
        return
    located, seen = optimizer_wrappers.find(value), dict[str, int]()
    for owner in (*located.wrappers, *located.optimizers):
        kind = type(owner).__name__
        seen[kind] = number = seen.get(kind, 0) + 1
        yield NamedOwner(f"{kind}{f'#{number}' if number > 1 else ''}", owner)


def is_number(value: object) -> bool:
    """Whether an attribute is saved: a plain number, or a tensor with a single one."""
    return type(value) in _KINDS or (type(value) is torch.Tensor and value.numel() == 1)


def _kept(value: object) -> object:
    """A value for comparison: of a tensor, its identity and version, because it may be on a device."""
    return (id(value), value._version) if isinstance(value, torch.Tensor) else value


def _token(value: object) -> tuple[type, str]:
    return type(value), repr(value)


class SavedNumbers(NamedTuple):
    """The numbers of an optimizer as a part of the state, for each rank, in the group `extra`."""

    numbers: WrapperNumbers
    state: Mapping[str, Any]
    rank: int

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP})

    @property
    def name(self) -> str:
        return f"{self.numbers.key}/numbers"

    def collect(self, content: Content) -> None:
        numbers = self.numbers.look(self.state[self.numbers.key])
        if not numbers:
            return
        values = {name: getattr(*one) for name, one in sorted(numbers.items())}
        tree = trees.grow(values, self.name, self.name, f"{RANK_PREFIX}{self.rank:05d}/{self.name}")
        content.add_value(GROUP, self.name, tree.text)
        for name, tensor in tree.tensors.items():
            content.add(GROUP, name, tensor)

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan:
        """Want the saved numbers. Those without a live attribute are noted."""
        plan, text, live = PartPlan(), stored.value(GROUP, self.name), self.state[self.numbers.key]
        if text is None or not selection.takes(GROUP, self.name):
            return plan
        plan.documents.append((GROUP, self.name))
        regrown = trees.regrow(text, self.name, partial(stored.spec, GROUP), {})
        plan.missing += [f"{GROUP}/{name}" for name in regrown.unknown]
        for name, tensor in regrown.tensors.items():
            plan.want(GROUP, name, tensor)
        if regrown.unknown:
            return plan
        saved, known = regrown.build(), self.numbers.names(live)
        if not isinstance(saved, dict):
            raise CorruptManifest(
                f"the stored value of {self.name} is not a set of numbers",
                hint="restore another step, or exclude this name with exclude=",
                file="state.json",
            )
        if lost := sorted(saved.keys() - known):
            text = f"{self.numbers.key} has no {', '.join(lost)}, which the checkpoint has: not restored"
            plan.notes.append(LeftOutNote(text))
        plan.actions.append(lambda: self.numbers.put(live, {name: saved[name] for name in saved.keys() & known}))
        return plan

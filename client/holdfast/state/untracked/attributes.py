"""Finds attributes of the user's modules and optimizers that no state_dict() lists, and that training changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch

from holdfast.state.untracked.traces import UNKNOWN, Tracer, is_data, is_plain

STORED = frozenset({bool, int, float, str, type(None)})  # kinds whose value is told
TEXT_MAX = 200
_PRIVATE = frozenset({bool, int, float})  # plain values that count under a private name, too
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))


class _Look(NamedTuple):
    """An object at the first look: its plain attributes with their values, and traces of the others."""

    path: str
    held: Mapping[str, Any]
    names: tuple[str, ...]
    values: tuple[object, ...]
    traces: Mapping[str, object]


class Attributes:
    """Attributes of objects, as they were when they were first seen.

    All are compared at the first few saves, and later some at each save, in turn, so that a save of very many modules costs
    nothing for it.
    """

    AT_ONCE, WHOLE = 256, 4

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._known: dict[int, object] = {}
        self._looks: list[_Look] = []
        self._changed: dict[str, tuple[Mapping[str, Any], str]] = {}
        self._next = self._times = 0

    def see_modules(self, path: str, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Take a first look at modules that are new. torch's own have nothing that training changes, and what has a
        get_extra_state() decides itself what is stored.
        """
        for name, module in modules:
            if id(module) in self._known:
                continue
            self._known[id(module)] = module
            if not type(module).__module__.startswith("torch.") and not _keeps_its_own(module):
                self._look(f"{path}.{name}" if name else path, vars(module), _OF_EVERY_MODULE)

    def see(self, path: str, owner: object, but: Collection[str]) -> None:
        """Take a first look at another object, except its attributes `but`."""
        if id(owner) not in self._known and hasattr(owner, "__dict__"):
            self._known[id(owner)] = owner
            self._look(path, vars(owner), but)

    def changed(self) -> dict[str, object]:
        """The attributes that were seen to change, by path, with their values now."""
        count = len(self._looks)
        self._times += 1
        for _ in range(count if self._times <= self.WHOLE else min(self.AT_ONCE, count)):
            look = self._looks[self._next % count]
            self._next = (self._next + 1) % count
            for name in self._news(look):
                self._changed.setdefault(f"{look.path}.{name}", (look.held, name))
        return {path: held.get(name) for path, (held, name) in self._changed.items()}

    def _look(self, path: str, held: Mapping[str, Any], but: Collection[str]) -> None:
        counts = [name for name, value in held.items() if name not in but and _counts(name, value)]
        plain = tuple(name for name in counts if is_plain(held[name]))
        others = {name: self._tracer.trace(held[name]) for name in counts if name not in plain}
        traces = {name: trace for name, trace in others.items() if trace is not UNKNOWN}
        if plain or traces:
            self._looks.append(_Look(path, held, plain, tuple(map(held.get, plain)), traces))

    def _news(self, look: _Look) -> Iterator[str]:
        """The names of what has changed since."""
        now = tuple(map(look.held.get, look.names))
        if not all(map(is_, now, look.values)):
            for name, old, new in zip(look.names, look.values, now, strict=True):
                if type(new) is not type(old) or (new != old and not (new != new and old != old)):
                    yield name
        for name, before in look.traces.items():
            if f"{look.path}.{name}" not in self._changed:
                now_traced = self._tracer.trace(look.held.get(name))
                if now_traced is not UNKNOWN and now_traced != before:
                    yield name


def shown(values: Mapping[str, object]) -> dict[str, Any]:
    """Those whose values can be told: numbers and short texts."""
    return {
        path: value
        for path, value in values.items()
        if type(value) in STORED and not (isinstance(value, str) and len(value) > TEXT_MAX)
    }


def plain_values(path: str, held: Mapping[str, Any]) -> dict[str, Any]:
    """The values of an object's plain attributes, by path."""
    return {f"{path}.{name}": value for name, value in held.items() if type(value) in STORED}


def _counts(name: str, value: object) -> bool:
    """Whether an attribute is looked at. Under private names, frameworks keep texts, lists and objects of their own."""
    return not name.startswith("_") or type(value) in _PRIVATE or is_data(value)


def _keeps_its_own(module: torch.nn.Module) -> bool:
    return "get_extra_state" in vars(module) or type(module).get_extra_state is not torch.nn.Module.get_extra_state

"""Finds attributes of modules, tensors and optimizers that are in no state_dict(), and that training changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from holdfast.state.untracked.ownership import (
    is_framework_object,
    is_layer,
    is_of_framework,
    is_of_torch,
    names_of_frameworks,
    own_class,
)
from holdfast.state.untracked.traces import UNKNOWN, ForwardTracer, is_data, is_plain
from holdfast.tensors.fragments import is_dtensor

STORED = frozenset({bool, int, float, str, type(None)})  # kinds whose values are reported
TEXT_MAX = 200
_PRIVATE = frozenset({bool, int, float})  # plain values that count under a private name of any class
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


class _Rule(NamedTuple):
    """Which attributes of an object are watched, and which count as changed if they appear later."""

    counts: Callable[[str, object], bool]
    comes: Callable[[str, object], bool]


class _Place(NamedTuple):
    """A watched object, or a tensor of a module by its name."""

    owner: int
    tensor: str = ""


class _Look(NamedTuple):
    """An object when it was first seen: its plain attributes with their values, traces of the others, and `size`, the number
    of all.
    """

    path: str
    held: Mapping[str, Any]
    rule: _Rule
    size: int
    names: tuple[str, ...]
    values: tuple[object, ...]
    traces: Mapping[str, object]


class Attributes:
    """Attributes of objects when they were first seen.

    All are compared at the first save, and later some at each save, in turn, so that saves of very many modules are not
    slowed. The number of attributes is compared at each save.
    """

    AT_ONCE, OF_TRACE = 512, 8  # looks at each save, and as how many a trace counts

    def __init__(self, tracer: ForwardTracer) -> None:
        self._tracer = tracer
        self._known: dict[int, object] = {}
        self._places: dict[_Place, int] = {}  # of looks
        self._probe: list[_Look] = []
        self._held: list[Mapping[str, Any]] = []
        self._sizes: list[int] = []
        self._turn: list[int] = []
        self._changed: dict[str, tuple[Mapping[str, Any], str]] = {}
        self._next, self._compared = 0, False

    def see_modules(self, path: str, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Record new modules and tensors. A get_extra_state() decides itself what is stored, and a lazy module is skipped
        until its first forward pass.
        """
        for name, module in modules:
            if isinstance(module, LazyModuleMixin):
                continue
            below = f"{path}.{name}" if name else path
            if id(module) not in self._known:
                self._known[id(module)] = module
                rule = None if _keeps_its_own(module) else _rule_of(module)
                if rule is not None:
                    self._look(_Place(id(module)), below, vars(module), rule)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and _is_plain_tensor(tensor):
                    self._see_tensor(_Place(id(module), key), f"{below}.{key}", tensor)

    def record(self, path: str, owner: object, but: Collection[str]) -> None:
        """Record another object, except its attributes `but`."""
        if id(owner) not in self._known and hasattr(owner, "__dict__"):
            self._known[id(owner)] = owner
            theirs = {*but, *names_of_frameworks(type(owner).__mro__)}
            self._look(
                _Place(id(owner)), path, vars(owner), _Rule(lambda n, v: n not in but and _counts(n, v, theirs), _never)
            )

    def look_again(self) -> None:
        """Record everything again as the first look."""
        for place, look in enumerate(self._probe):
            self._put(place, self._of(look.path, look.held, look.rule, look.held.items()))

    def changed(self, whole: bool = False) -> dict[str, object]:
        """The changed attributes, by path, with their present values; `whole` compares all at once."""
        self._see_newcomers()
        left = self.AT_ONCE
        for _ in self._turn:
            look = self._probe[self._turn[self._next]]
            self._next = (self._next + 1) % len(self._turn)
            left -= 1 + self.OF_TRACE * len(look.traces)
            for name in self._news(look):
                self._changed.setdefault(f"{look.path}.{name}", (look.held, name))
            if left <= 0 and self._compared and not whole:
                break
        self._compared = True
        return {path: held.get(name) for path, (held, name) in self._changed.items()}

    def _see_tensor(self, place: _Place, path: str, tensor: torch.Tensor) -> None:
        held, known = vars(tensor), self._places.get(place)
        if known is None or self._held[known] is not held:
            self._look(place, path, held, _OF_TENSORS)

    def _see_newcomers(self) -> None:
        """Later attributes count as changed, or are watched from now on."""
        sizes = list(map(len, self._held))
        if sizes == self._sizes:
            return
        for place, (before, now) in enumerate(zip(self._sizes, sizes, strict=True)):
            if before != now:
                look = self._probe[place]
                new = self._of(look.path, look.held, look.rule, islice(look.held.items(), min(before, now), None))
                came = [name for name in (*new.names, *new.traces) if look.rule.comes(name, look.held[name])]
                self._changed.update({f"{look.path}.{name}": (look.held, name) for name in came})
                names, traces = (*look.names, *new.names), {**look.traces, **new.traces}
                self._put(place, new._replace(names=names, values=(*look.values, *new.values), traces=traces))

    def _look(self, place: _Place, path: str, held: Mapping[str, Any], rule: _Rule) -> None:
        if place not in self._places:
            self._places[place] = len(self._probe)
            self._held.append(held)
            self._sizes.append(0)
            self._probe.append(_Look(path, held, rule, 0, (), (), {}))
        self._put(self._places[place], self._of(path, held, rule, held.items()))

    def _of(self, path: str, held: Mapping[str, Any], rule: _Rule, items: Iterable[tuple[str, Any]]) -> _Look:
        counts = {name: value for name, value in items if rule.counts(name, value)}
        plain = tuple(name for name, value in counts.items() if is_plain(value))
        others = {name: self._tracer.trace(value) for name, value in counts.items() if name not in plain}
        traces = {name: trace for name, trace in others.items() if trace is not UNKNOWN}
        return _Look(path, held, rule, len(held), plain, tuple(map(counts.get, plain)), traces)

    def _put(self, place: int, look: _Look) -> None:
        if (look.names or look.traces) and not (self._probe[place].names or self._probe[place].traces):
            self._turn.append(place)
        self._probe[place], self._held[place], self._sizes[place] = look, look.held, look.size

    def _news(self, look: _Look) -> Iterator[str]:
        now = tuple(map(look.held.get, look.names))
        if not all(map(is_, now, look.values)):
            for name, old, new in zip(look.names, look.values, now, strict=True):
                if is_plain(new) and type(new) is type(old):
                    changed = new != old and not (new != new and old != old)
                else:
                    counts = is_plain(new) or look.rule.counts(name, new)
                    changed = counts and self._tracer.trace(new) is not UNKNOWN
                if changed:
                    yield name
        for name, before in look.traces.items():
            if f"{look.path}.{name}" not in self._changed:
                trace = self._tracer.trace(look.held.get(name))
                if trace is not UNKNOWN and trace != before:
                    yield name


def shown(values: Mapping[str, object]) -> dict[str, Any]:
    """Those with values that can be reported: numbers and short texts."""
    return {
        path: value
        for path, value in values.items()
        if type(value) in STORED and not (isinstance(value, str) and len(value) > TEXT_MAX)
    }


def plain_values(path: str, held: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{path}.{name}": value for name, value in held.items() if type(value) in STORED}


def _rule_of(module: torch.nn.Module) -> _Rule | None:
    """The rule for the user's and the frameworks' modules, and for torch's layers; None for others of torch."""
    if is_layer(module):
        return _OF_LAYERS
    if is_of_torch(module):
        return None
    theirs = names_of_frameworks(type(module).__mro__)
    if is_of_framework(own_class(module)):
        return _Rule(lambda name, value: _counts(name, value, theirs), _never)
    return _Rule(
        lambda name, value: _counts(name, value, theirs),
        lambda name, value: name not in theirs and not (name.startswith("_") and type(value) is bool),
    )


def _counts(name: str, value: object, theirs: Collection[str]) -> bool:
    """Whether an attribute of a module, optimizer or wrapper is watched. Frameworks keep texts, lists and objects under
    private names.
    """
    if name in _OF_EVERY_MODULE:
        return False
    if not name.startswith("_") or type(value) in _PRIVATE or is_data(value):
        return True
    return name not in theirs and name.isidentifier() and "cache" not in name.lower() and not is_framework_object(value)


def _counts_in_layer(name: str, value: object) -> bool:
    return is_plain(value) and not name.startswith("_") and name not in _OF_EVERY_MODULE


def _counts_on_tensor(name: str, value: object) -> bool:
    """Attributes about gradients are no state, and DeepSpeed prefixes its own marks with `ds_`."""
    if "grad" in name.lower() or name.startswith("ds_"):
        return False
    return not name.startswith("_") or type(value) in _PRIVATE or is_data(value)


def _never(name: str, value: object) -> bool:
    return False


def _may_come(name: str, value: object) -> bool:
    """Whether a tensor's later attribute is no mark of a framework: these are flags, or private."""
    return not name.startswith("_") and type(value) is not bool


_OF_LAYERS = _Rule(_counts_in_layer, _never)
_OF_TENSORS = _Rule(_counts_on_tensor, _may_come)


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no attributes of its class, as quantized weights do."""
    kind = type(tensor)
    return kind in _TENSORS or is_dtensor(tensor) or not (is_of_framework(kind) or hasattr(kind, "__tensor_flatten__"))


def _keeps_its_own(module: torch.nn.Module) -> bool:
    return "get_extra_state" in vars(module) or type(module).get_extra_state is not torch.nn.Module.get_extra_state

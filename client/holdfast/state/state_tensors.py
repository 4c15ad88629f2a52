"""The form in which optimizers of every kind are stored: tensors by parameter and key, and a document of everything else.

Per optimizer the group `optim` holds one JSON document under the optimizer's key in the state:

    {"groups": {first name: {"params": [names], "lr": …}}, "state": {name: {key: value}},
     "masters": {key: [names]}, "kinds": {key: kind}, "wrapped": {name: {key: description}},
     "began": {first name: lr}, "blocks": {name: {key: description}}, "idle": [names]}

`groups` are the hyper-parameters, by the group's first parameter; `state` is what is kept per parameter besides tensors;
`masters` the parameters whose full-precision copy, kept under that key, is stored in the group `master`; `kinds` says of a
key's tensors what a restore cannot see from their shape. `wrapped`, if there is any, says what the wrapper tensors are whose
inner tensors are stored as `name/key.attribute`, such as those of quantised optimizers. `began` has the learning rate that
a group began with, if the user's own loop has set another one since. An import has `"numbered": true`, and numbers in place
of names, if its source has no names (`tensors.numbered_parameters`).
`blocks` is what `partitioned.blocks` describes. `idle`, if there is any, are the parameters of which this rank has no state,
while it has some of others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

import torch

from holdfast.state import masters
from holdfast.state.hyper_parameters import IMPLEMENTATION
from holdfast.tensors import trees
from holdfast.tensors.fragments import Fragment, FragmentList, Storable, global_shape, is_dtensor, local_tensors
from holdfast.tensors.leaves import Content, Key, PartPlan, Selection
from holdfast.tensors.optimizer_documents import BEGAN
from holdfast.tensors.torch_dtypes import has_memory, memory_span
from holdfast_formats.mapping import optimizer_state

GROUP = "optim"
MASTER_GROUP = masters.MASTER_GROUP
MASTER_KEYS = optimizer_state.MASTER_KEYS
NESTED_MAX = 4  # containers in containers of a parameter's state in which tensors are looked for
LOCAL, PLAIN, MESH, WHOLE = "local", "plain", "mesh", "whole"
_SCALARS = frozenset({bool, int, float, str, type(None)})  # immutable, compared by `repr`


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state, and where it is stored. `local` is its memory, if `value` only gives its place;
    `kind` says how a restore creates it, if the shape alone would suggest another kind.
    """

    name: str
    key: str
    target: Key
    value: Storable
    local: torch.Tensor | None = None
    kind: str = ""


class NewTensor(NamedTuple):
    """A tensor for state that an optimizer lacks: as passed to the optimizer, and as a `StateTensor` has it."""

    given: Any
    value: Storable
    local: torch.Tensor | None = None


class Documented(Protocol):
    @property
    def key(self) -> str: ...
    def groups_of_parameters(self) -> Iterable[Mapping[str, Any]]: ...
    def names_of_groups(self) -> list[list[str]]: ...
    def began(self) -> dict[str, float]: ...


class OptimizerDocument:
    """An optimizer's state except tensors, as JSON: hyper-parameters may change from save to save."""

    def __init__(self, state: Documented, known: Mapping[str, Any]) -> None:
        self._state, self._known = state, known
        kept = [value for values in known["state"].values() for value in values.values()]
        self._constant = all(type(value) in _SCALARS for value in kept)
        self._written: tuple[str, trees.Tree] | None = None

    def collect(self, content: Content) -> None:
        """Add the document, encoded again if anything in it may have changed."""
        hyper = [{k: v for k, v in group.items() if k != "params"} for group in self._state.groups_of_parameters()]
        plain = self._constant and all(_is_scalar(value) for group in hyper for value in group.values())
        seen = repr(hyper) if plain else ""
        if self._written is None or not plain or self._written[0] != seen:
            began = self._state.began()
            document = {"groups": _hyper(self._state), **self._known, **({BEGAN: began} if began else {})}
            self._written = seen, trees.grow(document, self._state.key, self._state.key)
        tree = self._written[1]
        content.add_value(GROUP, self._state.key, tree.text)
        for name, tensor in tree.tensors.items():
            content.add(GROUP, name, tensor)


def _hyper(state: Documented) -> dict[str, dict[str, Any]]:
    """The hyper-parameters of every group, by the name of its first parameter."""
    found = {}
    for position, (names, group) in enumerate(zip(state.names_of_groups(), state.groups_of_parameters(), strict=True)):
        kept = {k: v for k, v in group.items() if k not in IMPLEMENTATION}
        found[names[0] if names else f"#{position}"] = {"params": names, **kept}
    return found


def collect_state(
    content: Content,
    kept: Mapping[str, Mapping[str, Any]],
    entries: Iterable[StateTensor],
    elsewhere: Collection[str],
    weights: Mapping[str, Storable] | None = None,
) -> dict[str, Any]:
    """Add the tensors, and return the document of the other values and of what the tensors are. `weights` are the parameters
    whose place tensors in containers may have.

    `elsewhere` are the parameters of which other ranks hold everything. A number of those is a count from before:
    other ranks have the one that goes on.
    """
    document: dict[str, Any] = {"state": {}, "masters": {}, "kinds": {}}
    weights = {} if weights is None else weights
    kinds: list[tuple[str, str]] = []
    for name, values in kept.items():
        for key, value in values.items():
            for nested in _nested(value):
                kinds.append((key, kind_of(weights.get(name, nested), nested)))
        if plain := {key: value for key, value in values.items() if not is_storable(value)}:
            document["state"][name] = plain
    for entry in entries:
        kinds.append((entry.key, entry.kind))
        if entry.target[0] == MASTER_GROUP:
            document["masters"].setdefault(entry.key, []).append(entry.name)
        memory = entry.value if entry.local is None else entry.local
        if entry.name in elsewhere and not global_shape(memory):
            continue
        if not holds(content, entry.target, memory):  # the mapping `master` may hold the identical tensor
            content.add(*entry.target, entry.value, entry.local)
    for key, kind in sorted(kinds, key=lambda one: one[1] == WHOLE):  # which matters only where nothing else is said
        if kind:
            document["kinds"].setdefault(key, kind)
    return document


def _nested(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in a container of an optimizer's state."""
    if isinstance(value, Mapping | list | tuple) and depth < NESTED_MAX:
        for item in value.values() if isinstance(value, Mapping) else value:
            if isinstance(item, torch.Tensor):
                yield item
            else:
                yield from _nested(item, depth + 1)


def want_live(entries: Iterable[StateTensor], plan: PartPlan, selection: Selection, done: Collection[Key]) -> None:
    """Want all selected tensors that are not done yet."""
    for entry in entries:
        if entry.target not in done and selection.takes(*entry.target):
            plan.want(*entry.target, entry.value, entry.local)


def is_storable(value: object) -> TypeGuard[Storable]:
    return isinstance(value, torch.Tensor | Fragment | FragmentList)


def device_of(value: Storable) -> torch.device:
    """Where this rank's part of it is."""
    return next((local.device for local in local_tensors(value)), torch.device("cpu"))


def _is_scalar(value: object) -> bool:
    return all(type(item) in _SCALARS for item in (value if type(value) is tuple else (value,)))


def holds(content: Content, key: Key, value: Storable) -> bool:
    """Whether a leaf of this name already has this tensor's memory."""
    leaf = content.leaves.get(key)
    if leaf is None or not all(map(has_memory, memory := local_tensors(value))):
        return False
    held = [memory_span(local) for local in memory]
    spans = (memory_span(piece.tensor) for piece in leaf.pieces)
    return all(any(mine.start <= span.start and span.stop <= mine.stop for mine in held) for span in spans)


def kind_of(weight: Storable, value: Storable, shard: bool = False) -> str:
    """How a restore creates such a tensor, if the shape alone would suggest another kind; `shard`: though plain, it is this
    rank's part.
    """
    if not is_dtensor(weight) or isinstance(value, Fragment | FragmentList):
        return ""
    alike = global_shape(value) == global_shape(weight)
    if is_dtensor(value):
        return "" if alike else MESH
    if shard:
        return LOCAL
    return "" if not value.dim() else PLAIN if alike else WHOLE

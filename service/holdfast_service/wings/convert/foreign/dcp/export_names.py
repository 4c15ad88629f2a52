"""The keys of a checkpoint's tensors and values in a DCP state dict, for each layout of an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

from holdfast_formats.errors import CheckpointError, InvalidRequest, StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import TensorKey, is_of_rank
from holdfast_service.wings.convert.foreign import json_values

Layout = Literal["fsdp", "torchtitan", "plain"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
Path = tuple[str | int, ...]

_MODEL, _EMA, _EXTRA = "model", "ema", "extra"
_TITAN_OPTIMIZER = "optimizer"


class ExportedLeaf(NamedTuple):
    path: Path
    tensor: MappedTensor | None
    value: Any = None

    @property
    def fqn(self) -> str:
        return ".".join(map(str, self.path))


class ExportedNames(NamedTuple):
    """The entries of the state dict, and omitted ones with the reason."""

    leaves: tuple[ExportedLeaf, ...]
    left_out: tuple[tuple[str, str], ...]


class _Stored(NamedTuple):
    name: str


def names_of(
    tensors: Mapping[TensorKey, MappedTensor], documents: Mapping[str, Mapping[str, Any]], layout: str
) -> ExportedNames:
    """Name everything. Raises `InvalidRequest` for an unknown layout, `StateMismatch` for duplicate keys."""
    if layout not in LAYOUTS:
        raise InvalidRequest(f"there is no layout {layout!r}", hint=f"one of {', '.join(LAYOUTS)}")
    naming = _Naming(tensors, layout)
    groups = _groups(layout)
    naming.weights((_MODEL,))
    for group in groups:
        for key, document in documents.get(group, {}).items():
            naming.document(key, document, group, (group, key) if layout == "fsdp" else (key,))
    if layout != "plain":
        for key, document in documents.get(optimizer_state.GROUP, {}).items():
            naming.optimizer(key, document, len(documents[optimizer_state.GROUP]))
        if not documents.get(optimizer_state.GROUP):
            naming.optimizer_without_document()
        for key, document in documents.get(_EXTRA, {}).items():
            naming.document(key, document, _EXTRA, (key,))
        naming.other_extra()
    naming.weights(groups[1:])  # optimizers have taken the masters that they keep in their state
    placed = groups if layout == "plain" else (*groups, optimizer_state.GROUP, _EXTRA)
    naming.left_out.extend(
        (f"{g}/{key}", _no_place(layout, g)) for g, held in documents.items() if g not in placed for key in held
    )
    return naming.finish()


class _Naming:
    """Names the contents of one checkpoint; `waiting` are the tensors without a name so far."""

    def __init__(self, tensors: Mapping[TensorKey, MappedTensor], layout: str) -> None:
        self.waiting, self.layout = dict(tensors), layout
        self.leaves: list[ExportedLeaf] = []
        self.left_out: list[tuple[str, str]] = []

    def weights(self, groups: tuple[str, ...]) -> None:
        for group in groups:
            for key in [key for key in self.waiting if key.group == group and not is_of_rank(key.name)]:
                self._tensor(key, (group, key.name) if self.layout == "fsdp" else (key.name,))

    def optimizer(self, key: str, document: Any, count: int) -> None:
        """Name the state and groups of one optimizer, of `count` in the checkpoint."""
        if optimizer_state.is_numbered(document):
            reason = "its parameters have numbers: a trainer that restores it, and saves, stores it by names"
            self.left_out.append((f"{optimizer_state.GROUP}/{key}", reason))
            return
        try:
            held = json_values.decode(document, lambda _, name: _Stored(name))
            groups = list(held["groups"].values())
            params = [name for group in groups for name in group["params"]]
            masters = {name: kind for kind, names in held["masters"].items() for name in names}
            values = held["state"]
        except (CheckpointError, AttributeError, KeyError, TypeError) as error:
            self.left_out.append((f"{optimizer_state.GROUP}/{key}", f"its document cannot be read: {error}"))
            return
        titan = self.layout == "torchtitan"
        if titan and count > 1:
            self.left_out.append((f"{optimizer_state.GROUP}/{key}", "torchtitan stores all optimizers as one"))
            return
        place = _OptimizerPlace(_TITAN_OPTIMIZER if titan else key, titan)
        self._state(params, place)
        for name in params:
            if name in masters and TensorKey(optimizer_state.MASTER_GROUP, name) in self.waiting:
                self._tensor(TensorKey(optimizer_state.MASTER_GROUP, name), place.state(name, masters[name]))
            for kind, value in values.get(name, {}).items():
                self._value(place.state(name, kind), value, optimizer_state.GROUP)
        for position, group in enumerate(groups):
            missing = {kind: value for kind, value in optimizer_state.IMPLEMENTATION.items() if kind not in group}
            for kind, value in {**group, **missing}.items():
                for path in place.hyper(position, group["params"], kind):
                    self._value(path, value, optimizer_state.GROUP)

    def optimizer_without_document(self) -> None:
        """Name optimizer state without hyper-parameters."""
        titan = self.layout == "torchtitan"
        owners = [key.name.rpartition("/")[0] for key in self.waiting if key.group == optimizer_state.GROUP]
        self._state([name for name in dict.fromkeys(owners) if name], _OptimizerPlace(optimizer_state.KEY, titan))
        if owners:
            self.left_out.append((f"{optimizer_state.GROUP} (hyper-parameters)", "the checkpoint has none"))

    def document(self, key: str, document: Any, group: str, path: Path) -> None:
        """Name a value that is no tensor, and the tensors that it refers to."""
        if (group, key) == (_EXTRA, "rng"):
            self.left_out.append((f"{_EXTRA}/{key}", "random number states belong to the ranks that saved them"))
            return
        try:
            held = json_values.decode(document, lambda _, name: _Stored(name))
        except CheckpointError as error:
            self.left_out.append((f"{group}/{key}", error.detail))
            return
        self._value(path, held, group)

    def other_extra(self) -> None:
        """Name tensors of the group `extra` that no document refers to."""
        for key in [key for key in self.waiting if key.group == _EXTRA and not is_of_rank(key.name)]:
            first, slash, rest = key.name.partition("/")
            self._tensor(key, (first, rest) if slash else (first,))

    def finish(self) -> ExportedNames:
        for group, name in self.waiting:
            reason = "it belongs to one rank" if is_of_rank(name) else _no_place(self.layout, group)
            self.left_out.append((f"{group}/{name}", reason))
        seen: set[str] = set()
        for leaf in self.leaves:
            if leaf.fqn in seen:
                raise StateMismatch(f"two entries would have the key {leaf.fqn!r}", hint="choose another layout")
            seen.add(leaf.fqn)
        return ExportedNames(tuple(self.leaves), tuple(self.left_out))

    def _state(self, params: list[str], place: _OptimizerPlace) -> None:
        known = set(params)
        for key in [key for key in self.waiting if key.group == optimizer_state.GROUP]:
            name, _, kind = key.name.rpartition("/")
            if name in known:
                self._tensor(key, place.state(name, kind))

    def _tensor(self, key: TensorKey, path: Path) -> None:
        self.leaves.append(ExportedLeaf(path, self.waiting.pop(key)))

    def _value(self, path: Path, value: Any, group: str) -> None:
        for inner, leaf in _leaves(path, value):
            named = ".".join(map(str, inner))
            if isinstance(leaf, _Stored):
                key = TensorKey(group, leaf.name)
                if key in self.waiting:
                    self._tensor(key, inner)
                else:
                    self.left_out.append((named, f"the tensor {leaf.name!r} is not exported"))
            elif _refers(leaf):
                self.left_out.append((named, "it has tensors inside a Python value"))
            else:
                self.leaves.append(ExportedLeaf(inner, None, leaf))


class _OptimizerPlace(NamedTuple):
    """Where an optimizer's state is: torchtitan joins names and keys, `get_state_dict` nests them."""

    key: str
    joined: bool

    def state(self, name: str, kind: str) -> Path:
        return (self.key, f"state.{name}.{kind}") if self.joined else (self.key, "state", name, kind)

    def hyper(self, position: int, params: list[str], kind: str) -> list[Path]:
        if not self.joined:
            return [(self.key, "param_groups", position, kind)]
        return [(self.key, f"param_groups.{name}.{kind}") for name in params if kind != "params"]


def _leaves(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The leaves as DCP finds them: it enters mappings, and lists that contain tensors or mappings."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves((*path, str(key)), item)
    elif isinstance(value, list) and not _is_terminal(value):
        for position, item in enumerate(value):
            yield from _leaves((*path, position), item)
    else:
        yield path, value


def _is_terminal(items: list[Any]) -> bool:
    return not any(isinstance(i, Mapping | _Stored) or (isinstance(i, list) and not _is_terminal(i)) for i in items)


def _refers(value: Any) -> bool:
    return isinstance(value, _Stored) or (isinstance(value, tuple | list | set) and any(map(_refers, value)))


def _groups(layout: str) -> tuple[str, ...]:
    """The groups of weights that a layout holds, the model first."""
    return (_MODEL, _EMA, optimizer_state.MASTER_GROUP) if layout == "fsdp" else (_MODEL,)


def _no_place(layout: str, group: str) -> str:
    instead = group in _groups("fsdp")[1:]
    way = f": --weights {group} exports it in place of the model's weights" if instead else ""
    return f"layout {layout} cannot hold group {group}{way}"

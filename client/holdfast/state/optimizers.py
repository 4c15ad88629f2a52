"""Optimizer state by parameter: `layers.0.q.weight/exp_avg`, never by index, so that it survives regrouping.

Per optimizer the group `optim` holds one JSON document under the optimizer's key in the state:

    {"groups": {first name: {"params": [names], "lr": …}}, "state": {name: {key: value}},
     "masters": {key: [names]}, "kinds": {key: kind}, "wrapped": {name: {key: description}},
     "began": {first name: lr}}

`groups` are the hyper-parameters, by the group's first parameter; `state` is what is kept per parameter besides tensors;
`masters` the parameters whose full-precision copy, kept under that key, is stored in the group `master`; `kinds` says of a
key's tensors what a restore cannot see from their shape. `wrapped`, if there is any, says what the wrapper tensors are whose
inner tensors are stored as `name/key.attribute`, such as those of quantised optimizers. `began` has the learning rate that
a group began with, if the user's own loop has set another one since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.state import masters
from holdfast.state.hyper_parameters import IMPLEMENTATION, FirstRates
from holdfast.tensors import trees, wrapped
from holdfast.tensors.fragments import (
    Fragment,
    FragmentList,
    Storable,
    global_shape,
    is_dtensor,
    is_sharded,
    local_tensor,
    local_tensors,
)
from holdfast.tensors.leaves import Content, Key, PartPlan, Selection
from holdfast.tensors.optimizer_documents import BEGAN, WRAPPED
from holdfast.tensors.torch_dtypes import has_memory, memory_span
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.foreign import optimizer_state

GROUP = "optim"
MASTER_GROUP = masters.MASTER_GROUP

MASTER_KEYS = optimizer_state.MASTER_KEYS

_SCALARS = frozenset({bool, int, float, str, type(None)})  # immutable, compared by `repr`

NESTED_MAX = 4  # mappings in mappings of a parameter's state in which copies are looked for

LOCAL, PLAIN, MESH = "local", "plain", "mesh"
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SHARDED = "blocks of quantised values cross the edges of shards, so no other layout could be restored"
_WHOLE = "keep it in an optimizer of whole parameters, or save without it: save(groups=…)"


class Parameter(NamedTuple):
    """A parameter of an optimizer: its name, the tensor, and the state's view of it (which may be Fragments)."""

    name: str
    tensor: torch.Tensor
    value: Storable
    group: dict[str, Any]
    optimizer: torch.optim.Optimizer

    @property
    def local(self) -> torch.Tensor:
        """This rank's memory, which has the shape of its state."""
        return self.tensor.detach() if isinstance(self.value, FragmentList) else local_tensor(self.value)


class OptimizerState(NamedTuple):
    """The torch optimizers under one key in the state, usually one, with the names of all their possible parameters. Several
    share one document: the state of a parameter does not depend on which of them steps it.
    """

    key: str
    optimizers: tuple[torch.optim.Optimizer, ...]
    names: Mapping[int, tuple[str, Storable]]
    rates: FirstRates

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP, MASTER_GROUP})

    def parameters(self) -> Iterator[Parameter]:
        """Its parameters in order; `InvalidRequest`, with the position, for one that does not belong to the state."""
        groups = [(optimizer, group) for optimizer in self.optimizers for group in optimizer.param_groups]
        for position, (optimizer, group) in enumerate(groups):
            for index, tensor in enumerate(group["params"]):
                if id(tensor) not in self.names:
                    raise InvalidRequest(
                        f"{self.key}.param_groups[{position}]['params'][{index}], of shape "
                        f"{list(tensor.shape)}, belongs to no module in the state",
                        hint="add the module that owns it to the state, or pass full-precision copies as 'master'; "
                        "if it is in the state as Fragments, give it to them as held=",
                    )
                name, value = self.names[id(tensor)]
                if isinstance(value, FragmentList):
                    value.check_held(tensor, f"{self.key}: {name}")
                yield Parameter(name, tensor, value, group, optimizer)

    def groups_of_parameters(self) -> Iterator[dict[str, Any]]:
        """The param_groups of all of them, in order."""
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def has_masters(self) -> bool:
        held = (parameter.optimizer.state.get(parameter.tensor, {}) for parameter in self.parameters())
        return any(not MASTER_KEYS.isdisjoint(state) for state in held)

    def parameter_names(self) -> Iterator[str]:
        return (parameter.name for parameter in self.parameters())

    def masters(self) -> Iterator[tuple[str, Storable, Storable]]:
        """Name, weight and full-precision copy of every parameter that has one in an optimizer's state.

        A key with one parameter's copy has those of all: others may be of zeros, or have changed since.
        """
        kept = [(one, list(_inside(self.state_of(one)))) for one in self.parameters()]
        keys: set[str] = set()
        for parameter, values in kept:
            for key, value in values:
                local = masters.in_form_of(local_tensor(value), parameter.local)
                if key not in keys and masters.is_copy(local, parameter.local) and masters.is_varied(parameter.local):
                    keys.add(key)
        for parameter, values in kept:
            # The Fragments of a list are views of the parameter, which has the form of the copy.
            weight = parameter.tensor if isinstance(parameter.value, FragmentList) else parameter.value
            for key, value in values:
                local = masters.in_form_of(local_tensor(value), parameter.local)
                found = key in keys and local.shape == parameter.local.shape and masters.is_wider(local, parameter.local)
                if is_master(parameter, key, value) or found or (not keys and masters.is_copy(local, parameter.local)):
                    yield parameter.name, weight, value if is_dtensor(value) else local

    def tensors(self) -> Iterator[Storable]:
        for optimizer in self.optimizers:
            for kept in optimizer.state.values():
                values = (value for value in kept.values() if isinstance(value, torch.Tensor))
                for value in values:
                    yield from wrapped.inner(value, self.key).values() if wrapped.is_wrapped(value) else (value,)

    def wrappers(self) -> Iterator[tuple[Parameter, str, torch.Tensor]]:
        """The wrapper tensors that it keeps, such as quantised state: parameter, key and tensor."""
        for parameter in self.parameters():
            for key, value in parameter.optimizer.state.get(parameter.tensor, {}).items():
                if wrapped.is_wrapped(value):
                    yield parameter, key, value

    def collect(self, content: Content) -> None:
        """Add every state tensor under its parameter's name, and the document with everything that is not a tensor."""
        self.collect_tensors(content).collect(content)

    def collect_tensors(self, content: Content) -> OptimizerDocument:
        """Add every state tensor. Return the document's part about them, which is valid until there are others."""
        parameters = list(self.parameters())
        self._refuse_ownerless(parameters)
        shards = self.shard_keys()
        document: dict[str, Any] = {"state": {}, "masters": {}, "kinds": {}}
        for parameter in parameters:
            for key, value in self.state_of(parameter).items():
                if not isinstance(value, torch.Tensor):
                    document["state"].setdefault(parameter.name, {})[key] = value
                    continue
                group, name = target(parameter, key, value)
                if kind := _kind(parameter, value, key in shards):
                    document["kinds"].setdefault(key, kind)
                if group == MASTER_GROUP:
                    document["masters"].setdefault(key, []).append(parameter.name)
                if is_elsewhere(parameter) and value.dim() == 0:
                    continue  # a count from before: other ranks have the one that goes on
                if not holds(content, (group, name), value):  # the mapping `master` may hold the identical tensor
                    content.add(group, name, *placed(parameter, value, key in shards))
        for parameter, key, value in self.wrappers():
            said = wrapped.describe(value, f"{self.key}: {parameter.name}/{key}")
            document.setdefault(WRAPPED, {}).setdefault(parameter.name, {})[key] = said
        return OptimizerDocument(self, document)

    def want_live(self, plan: PartPlan, selection: Selection, done: set[Key]) -> None:
        shards = self.shard_keys()
        for parameter in self.parameters():
            for key, value in self.state_of(parameter).items():
                if isinstance(value, torch.Tensor):
                    group, name = target(parameter, key, value)
                    if (group, name) not in done and selection.takes(group, name):
                        plan.want(group, name, *placed(parameter, value, key in shards))

    def shard_keys(self) -> frozenset[str]:
        """Keys whose plain tensors are this rank's shards, as in optimizers that work on local tensors.

        A key counts if its tensors have the local shape of every sharded parameter; a single one may have it by chance.
        """
        alike: dict[str, bool] = {}
        for parameter in self.parameters():
            if not is_sharded(parameter.value):
                continue
            local = tuple(parameter.local.shape)
            for key, value in self.state_of(parameter).items():
                if isinstance(value, torch.Tensor) and value.dim() and not is_dtensor(value):
                    alike[key] = alike.get(key, True) and tuple(value.shape) == local
        return frozenset(key for key, every in alike.items() if every)

    def state_of(self, parameter: Parameter) -> dict[str, Any]:
        """A parameter's state by key. For a wrapper tensor these are the tensors inside, as `key.attribute`."""
        state: dict[str, Any] = parameter.optimizer.state.get(parameter.tensor, {})
        for key in state:
            if not isinstance(key, str) or not key or "/" in key:
                raise InvalidRequest(
                    f"{self.key}: the state of {parameter.name} has the key {key!r}, which is not a valid name"
                )
        if any(type(value) not in _TENSORS and isinstance(value, torch.Tensor) for value in state.values()):
            return self._unwrapped(parameter, state)
        return state

    def _unwrapped(self, parameter: Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in state.items():
            path = f"{self.key}: {parameter.name}/{key}"
            if is_dtensor(value) and wrapped.is_wrapped(local_tensor(value)):
                raise InvalidRequest(f"{path} is a DTensor of {type(local_tensor(value)).__name__}: {_SHARDED}", hint=_WHOLE)
            if not wrapped.is_wrapped(value):
                parts = {key: value}
            elif is_sharded(parameter.value):
                raise InvalidRequest(
                    f"{path} is a {type(value).__name__}, and its parameter is sharded: {_SHARDED}", hint=_WHOLE
                )
            else:
                parts = {f"{key}.{name}": tensor for name, tensor in wrapped.inner(value, path).items()}
            if taken := parts.keys() & (found.keys() | (state.keys() - {key})):
                raise InvalidRequest(f"{path}: the name {min(taken)} is taken", hint="rename one of the optimizer's keys")
            found |= parts
        return found

    def _refuse_ownerless(self, parameters: Sequence[Parameter]) -> None:
        """Refuse state of anything but the parameters: it would have no name in the checkpoint."""
        owned = {(id(parameter.optimizer), id(parameter.tensor)) for parameter in parameters}
        for optimizer in self.optimizers:
            for key, kept in optimizer.state.items():
                if not isinstance(key, torch.Tensor):
                    raise InvalidRequest(f"{self.key}.state[{key!r}] belongs to no parameter and cannot be saved")
                if kept and (id(optimizer), id(key)) not in owned:
                    name = self.names[id(key)][0] if id(key) in self.names else "a tensor that is not in the state"
                    raise InvalidRequest(
                        f"{self.key} keeps {', '.join(map(str, kept))} for {name}, of shape {list(key.shape)}, "
                        "which is in none of its param_groups",
                        hint="add the tensor to a param_group, or remove its state: del optimizer.state[tensor]",
                    )

    def hyper(self) -> dict[str, dict[str, Any]]:
        groups = {}
        for position, group in enumerate(self.groups_of_parameters()):
            names = [self.names[id(tensor)][0] for tensor in group["params"]]
            kept = {k: v for k, v in group.items() if k not in IMPLEMENTATION}
            groups[names[0] if names else f"#{position}"] = {"params": names, **kept}
        return groups

    def began(self) -> dict[str, float]:
        """Initial learning rates of groups whose rate the user's own loop has changed, by the first parameter."""
        first = {self.names[id(group["params"][0])][0]: group for group in self.groups_of_parameters() if group["params"]}
        found = {name: self.rates.moved(group) for name, group in first.items()}
        return {name: lr for name, lr in found.items() if lr is not None}


class Documented(Protocol):
    @property
    def key(self) -> str: ...
    def groups_of_parameters(self) -> Iterable[Mapping[str, Any]]: ...
    def hyper(self) -> dict[str, dict[str, Any]]: ...
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
            document = {"groups": self._state.hyper(), **self._known, **({BEGAN: began} if began else {})}
            self._written = seen, trees.grow(document, self._state.key, self._state.key)
        tree = self._written[1]
        content.add_value(GROUP, self._state.key, tree.text)
        for name, tensor in tree.tensors.items():
            content.add(GROUP, name, tensor)


def _inside(values: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a parameter's state, including mappings and lists, by path."""
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            yield f"{path}{key}", value
        elif isinstance(value, Mapping | list | tuple) and depth < NESTED_MAX:
            items = value if isinstance(value, Mapping) else {str(i): item for i, item in enumerate(value)}
            yield from _inside(items, f"{path}{key}.", depth + 1)


def is_elsewhere(parameter: Parameter) -> bool:
    """Whether other ranks hold all of a parameter. Under FSDP1 only they step it."""
    value = parameter.value
    return isinstance(value, Fragment) and local_tensor(value).numel() == 0 and 0 not in global_shape(value)


def _is_scalar(value: object) -> bool:
    return all(type(item) in _SCALARS for item in (value if type(value) is tuple else (value,)))


def holds(content: Content, key: Key, value: Storable) -> bool:
    leaf = content.leaves.get(key)
    if leaf is None or not all(map(has_memory, memory := local_tensors(value))):
        return False
    held = [memory_span(local) for local in memory]
    spans = (memory_span(piece.tensor) for piece in leaf.pieces)
    return all(any(mine.start <= span.start and span.stop <= mine.stop for mine in held) for span in spans)


def placed(parameter: Parameter, value: torch.Tensor, shard: bool) -> tuple[Storable, torch.Tensor | None]:
    """The state tensor with its own or its parameter's place."""
    shard = shard and bool(value.dim()) and is_sharded(parameter.value) and not is_dtensor(value)
    return (parameter.value, local_tensor(value)) if shard else (value, None)


def is_master(parameter: Parameter, key: str, value: torch.Tensor) -> bool:
    return key in MASTER_KEYS and value.numel() in (parameter.tensor.numel(), parameter.local.numel())


def target(parameter: Parameter, key: str, value: torch.Tensor) -> Key:
    return (MASTER_GROUP, parameter.name) if is_master(parameter, key, value) else (GROUP, f"{parameter.name}/{key}")


def _kind(parameter: Parameter, value: torch.Tensor, shard: bool) -> str:
    """How a restore creates such a tensor, if the shape alone would suggest another kind."""
    if not is_dtensor(parameter.value):
        return ""
    alike = tuple(value.shape) == global_shape(parameter.value)
    if is_dtensor(value):
        return "" if alike else MESH
    if shard:
        return LOCAL
    return PLAIN if alike and value.dim() else ""

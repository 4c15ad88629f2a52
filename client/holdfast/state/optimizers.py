"""Optimizer state by parameter: `layers.0.q.weight/exp_avg`, never by index, so that it survives regrouping.

`state_tensors` describes the document beside the tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.state import masters
from holdfast.state.hyper_parameters import FirstRates, given_to
from holdfast.state.partitioned.live import LiveBlocks, blocks_of
from holdfast.state.partitioned.owners import RestoredForAll
from holdfast.state.state_tensors import (
    GROUP,
    LOCAL,
    MASTER_GROUP,
    MASTER_KEYS,
    MESH,
    NESTED_MAX,
    PLAIN,
    NewTensor,
    OptimizerDocument,
    StateTensor,
    collect_state,
    kind_of,
)
from holdfast.tensors import wrapped
from holdfast.tensors.fragments import (
    Fragment,
    FragmentList,
    Storable,
    global_shape,
    is_dtensor,
    is_sharded,
    local_tensor,
)
from holdfast.tensors.leaves import Content, Key
from holdfast.tensors.optimizer_documents import BLOCKS, IDLE, WRAPPED
from holdfast.tensors.torch_dtypes import local_shape
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import Shape

_TENSORS = (torch.Tensor, torch.nn.Parameter)


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

    @property
    def weight(self) -> Storable:
        """What its full-precision copy corresponds to: the tensor, if its Fragments are views of it."""
        return self.tensor if isinstance(self.value, FragmentList) else self.value

    @property
    def kept(self) -> Mapping[str, Any]:
        """What its optimizer keeps of it, by key."""
        state: Mapping[str, Any] = self.optimizer.state.get(self.tensor, {})
        return state

    @property
    def is_elsewhere(self) -> bool:
        """Whether other ranks hold all of it. Under FSDP1 only they step it, and this rank has no state of it."""
        value = self.value
        return isinstance(value, Fragment) and local_tensor(value).numel() == 0 and 0 not in global_shape(value)

    @property
    def state_dtype(self) -> torch.dtype | None:
        """That of its state, if the optimizer's step refuses another, as those of torch's optimizers do."""
        return self.tensor.dtype if type(self.optimizer).__module__.startswith("torch.optim.") else None

    def fresh(self, key: str, dtype: torch.dtype, whole: Shape, kind: str) -> NewTensor:
        """A state tensor as the optimizer would have made it itself, to be filled completely."""
        made, shard = self._fresh(key, dtype, local_shape(dtype, whole), kind)
        return NewTensor(made, *placed(self, made, shard))

    def _fresh(self, key: str, dtype: torch.dtype, shape: Shape, kind: str) -> tuple[torch.Tensor, bool]:
        """The tensor, and whether, though plain, it is this rank's shard of the state of a sharded parameter."""
        value, held = self.value, self.tensor.detach()
        if key == "step" and not shape:
            on_device = self.group.get("capturable") or self.group.get("fused")
            return torch.zeros((), dtype=dtype, device=held.device if on_device else "cpu"), False
        if shape == global_shape(value) and kind != PLAIN:
            if isinstance(value, FragmentList):
                return torch.zeros_like(held, dtype=dtype), True  # padding is in no Fragment and stays 0
            shard = kind == LOCAL or isinstance(value, Fragment)
            return torch.empty_like(self.local if shard else held, dtype=dtype), shard
        plain = torch.empty(shape, dtype=dtype, device=held.device)
        if kind == MESH and is_dtensor(held):
            from torch.distributed.tensor import DTensor, Replicate

            mesh = held.device_mesh  # type: ignore[attr-defined]
            plain = DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return plain, False


class KeyedOptimizers(NamedTuple):
    """The torch optimizers under one key in the state, usually one, with the names of all their possible parameters. Several
    share one document: the state of a parameter does not depend on which of them steps it.
    """

    key: str
    optimizers: tuple[torch.optim.Optimizer, ...]
    names: Mapping[int, tuple[str, Storable]]
    rates: FirstRates
    for_all: RestoredForAll

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
                        hint="add the module that owns it to the state, or pass full-precision copies as "
                        "'master'; if it is in the state as Fragments, pass it to them as held=",
                    )
                name, value = self.names[id(tensor)]
                if isinstance(value, FragmentList):
                    value.check_held(tensor, f"{self.key}: {name}")
                yield Parameter(name, tensor, value, group, optimizer)

    def groups_of_parameters(self) -> Iterator[dict[str, Any]]:
        """The param_groups of all of them, in order."""
        for optimizer in self.optimizers:
            yield from optimizer.param_groups

    def names_of_groups(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        return [[self.names[id(tensor)][0] for tensor in group["params"]] for group in self.groups_of_parameters()]

    def user_given(self) -> frozenset[str]:
        """The hyper-parameters that its user gives."""
        return given_to(self.optimizers)

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
            for key, value in values:
                local = masters.in_form_of(local_tensor(value), parameter.local)
                is_named = key in keys and local.shape == parameter.local.shape and masters.is_wider(local, parameter.local)
                if is_master(parameter, key, value) or is_named or (not keys and masters.is_copy(local, parameter.local)):
                    yield parameter.name, parameter.weight, value if is_dtensor(value) else local

    def tensors(self) -> Iterator[Storable]:
        for optimizer in self.optimizers:
            for kept in optimizer.state.values():
                values = (value for value in kept.values() if isinstance(value, torch.Tensor))
                for value in values:
                    held = wrapped.held_by(value)
                    yield from wrapped.inner(held, self.key).values() if wrapped.is_wrapped(held) else (value,)

    def wrappers(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """The wrapper tensors that it keeps, such as quantised state: name, key and tensor."""
        for parameter in self.parameters():
            for key, value in parameter.kept.items():
                held = wrapped.held_by(value)
                if wrapped.is_wrapped(held):
                    yield parameter.name, key, held

    @property
    def kept(self) -> Mapping[str, Mapping[str, Any]]:
        """What is kept of each parameter, by name and key."""
        return {parameter.name: self.state_of(parameter) for parameter in self.parameters()}

    def entries(self) -> Iterator[StateTensor]:
        """Every tensor that is kept of a parameter."""
        shards = self.shard_keys()
        for parameter in self.parameters():
            places = self._places_of_blocks(parameter)
            for key, value in self.state_of(parameter).items():
                if key in places:
                    yield StateTensor(parameter.name, key, (GROUP, f"{parameter.name}/{key}"), *places[key])
                elif isinstance(value, torch.Tensor):
                    kind = kind_of(parameter.value, value, key in shards)
                    place = placed(parameter, value, key in shards)
                    yield StateTensor(parameter.name, key, target(parameter, key, value), *place, kind)

    def blocks(self, parameter: Parameter) -> list[LiveBlocks]:
        """The blocks of codes that are kept of a parameter."""
        return blocks_of(parameter, parameter.kept, f"{self.key}: {parameter.name}")

    def _places_of_blocks(self, parameter: Parameter) -> dict[str, tuple[Storable, torch.Tensor | None, str]]:
        """Place, memory and kind of the tensors of blocks of a sharded parameter, by key."""
        if not is_sharded(parameter.value):
            return {}
        return {
            key: (value, local, LOCAL if one.is_local else "")
            for one in self.blocks(parameter)
            for key, value, local in one.places(parameter.value)
        }

    def collect(self, content: Content) -> None:
        """Add every state tensor under its parameter's name, and the document with everything that is not a tensor."""
        self.collect_tensors(content).collect(content)

    def collect_tensors(self, content: Content) -> OptimizerDocument:
        """Add every state tensor. Return the part of the document about them, which is valid until there are others."""
        self._refuse_ownerless()
        if self.for_all.pending:
            self.for_all.drop(self.parameters())
        elsewhere = {parameter.name for parameter in self.parameters() if parameter.is_elsewhere}
        weights = {parameter.name: parameter.value for parameter in self.parameters()}
        document = collect_state(content, self.kept, self.entries(), elsewhere, weights)
        idle = [parameter.name for parameter in self.parameters() if not parameter.kept and not parameter.is_elsewhere]
        if 0 < len(idle) < len(weights):
            document[IDLE] = idle
        for name, key, value in self.wrappers():
            description = wrapped.describe(value, f"{self.key}: {name}/{key}")
            document.setdefault(WRAPPED, {}).setdefault(name, {})[key] = description
        for parameter in (parameter for parameter in self.parameters() if is_sharded(parameter.value)):
            for one in self.blocks(parameter):
                if one.wrapper is not None:
                    document[WRAPPED][parameter.name][one.parts.key] = one.described(f"{self.key}: {parameter.name}")
                if described := one.blocks.described():
                    document.setdefault(BLOCKS, {}).setdefault(parameter.name, {})[one.parts.key] = described
        return OptimizerDocument(self, document)

    def install(self, groups: Sequence[Mapping[str, Any]], values: Mapping[str, Mapping[str, Any]]) -> None:
        """Take restored hyper-parameters, and state by name and key."""
        # Not with load_state_dict: it would cast every state tensor to its parameter's dtype.
        for parameter in self.parameters():
            if parameter.name in values:
                parameter.optimizer.state[parameter.tensor].update(values[parameter.name])
        for group, restored in zip(self.groups_of_parameters(), groups, strict=True):
            group.update(restored)

    def note_restored_for_all(self, names: Collection[str]) -> None:
        """Record the present state of these parameters: not all ranks had it when it was saved."""
        self.for_all.note(parameter for parameter in self.parameters() if parameter.name in names)

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

    def state_of(self, parameter: Parameter) -> Mapping[str, Any]:
        """A parameter's state by key. For a wrapper tensor these are the tensors inside, as `key.attribute`."""
        state = parameter.kept
        for key in state:
            if not isinstance(key, str) or not key or "/" in key:
                raise InvalidRequest(
                    f"{self.key}: the state of {parameter.name} has the key {key!r}, which is not a valid name",
                    hint="rename the key in the optimizer: text that is not empty and has no '/'",
                )
        if any(type(value) not in _TENSORS and isinstance(value, torch.Tensor) for value in state.values()):
            return self._unwrapped(parameter, state)
        return state

    def _unwrapped(self, parameter: Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for key, value in state.items():
            path = f"{self.key}: {parameter.name}/{key}"
            held = wrapped.held_by(value)
            inside = wrapped.inner(held, path) if wrapped.is_wrapped(held) else None
            parts = {key: value} if inside is None else {f"{key}.{name}": tensor for name, tensor in inside.items()}
            if taken := parts.keys() & (merged.keys() | (state.keys() - {key})):
                raise InvalidRequest(f"{path}: the name {min(taken)} is taken", hint="rename one of the optimizer's keys")
            merged |= parts
        return merged

    def _refuse_ownerless(self) -> None:
        """Refuse state that belongs to anything but the parameters: it would have no name in the checkpoint."""
        owned = {(id(parameter.optimizer), id(parameter.tensor)) for parameter in self.parameters()}
        for optimizer in self.optimizers:
            for key, kept in optimizer.state.items():
                if not isinstance(key, torch.Tensor):
                    raise InvalidRequest(
                        f"{self.key}.state[{key!r}] belongs to no parameter and cannot be saved",
                        hint="keep such values in a param_group, or remove them: del optimizer.state[key]",
                    )
                if kept and (id(optimizer), id(key)) not in owned:
                    name = self.names[id(key)][0] if id(key) in self.names else "a tensor that is not in the state"
                    raise InvalidRequest(
                        f"{self.key} keeps {', '.join(map(str, kept))} for {name}, of shape {list(key.shape)}, "
                        "which is in none of its param_groups",
                        hint="add the tensor to a param_group, or remove its state: del optimizer.state[tensor]",
                    )

    def began(self) -> dict[str, float]:
        """Initial learning rates of groups whose rate the user's own loop has changed, by the first parameter."""
        first = {self.names[id(group["params"][0])][0]: group for group in self.groups_of_parameters() if group["params"]}
        rates = {name: self.rates.moved(group) for name, group in first.items()}
        return {name: lr for name, lr in rates.items() if lr is not None}


def _inside(values: Mapping[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a parameter's state, including mappings and lists, by path."""
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            yield f"{path}{key}", value
        elif isinstance(value, Mapping | list | tuple) and depth < NESTED_MAX:
            items = value if isinstance(value, Mapping) else {str(i): item for i, item in enumerate(value)}
            yield from _inside(items, f"{path}{key}.", depth + 1)


def placed(parameter: Parameter, value: torch.Tensor, shard: bool) -> tuple[Storable, torch.Tensor | None]:
    """The state tensor with its own or its parameter's place."""
    shard = shard and bool(value.dim()) and is_sharded(parameter.value) and not is_dtensor(value)
    return (parameter.value, local_tensor(value)) if shard else (value, None)


def is_master(parameter: Parameter, key: str, value: torch.Tensor) -> bool:
    return key in MASTER_KEYS and value.numel() in (parameter.tensor.numel(), parameter.local.numel())


def target(parameter: Parameter, key: str, value: torch.Tensor) -> Key:
    return (MASTER_GROUP, parameter.name) if is_master(parameter, key, value) else (GROUP, f"{parameter.name}/{key}")

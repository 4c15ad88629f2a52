"""Optimizer state by parameter: `layers.0.q.weight/exp_avg`, never by index, so that it survives regrouping.

Per optimizer the group `optim` holds one JSON document under the optimizer's key in the state:

    {"groups": {first name: {"params": [names], "lr": …}}, "state": {name: {key: value}},
     "masters": {key: [names]}, "kinds": {key: kind}}

`groups` are the hyper-parameters, by the group's first parameter; `state` is what is kept per parameter besides tensors;
`masters` the parameters whose full-precision copy, kept under that key, is stored in the group `master`; `kinds` says of a
key's tensors what a restore cannot see from their shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from holdfast_formats.errors import CorruptManifest, InvalidRequest
from holdfast_formats.region import Shape

from . import trees
from .fragments import Fragment, Storable, global_shape, is_dtensor, local_tensor
from .leaves import Content, Key, Plan, Selection, Stored
from .torch_dtypes import local_shape, torch_dtype

GROUP = "optim"
MASTER_GROUP = "master"

# Names under which optimizers keep a parameter's full-precision copy in their per-parameter state.
MASTER_KEYS = frozenset(
    {
        "master_param",  # Transformer Engine, apex
        "master_params",
        "master_weight",
        "master_weights",
        "master",
        "fp32_param",
        "fp32_params",
        "fp32_master",
        "fp32_weight",
        "main_param",  # Megatron
        "param_fp32",
        "param_master",
    }
)
# How a step is computed, not what has been trained: the live optimizer's choice stays.
_IMPLEMENTATION = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})

_SCALARS = frozenset({bool, int, float, str, type(None)})  # `repr` tells them apart, and they never change

LOCAL, PLAIN, MESH = "local", "plain", "mesh"


class Parameter(NamedTuple):
    """A parameter an optimizer holds: its name, the tensor itself, and the state's view of it (a Fragment, perhaps)."""

    name: str
    tensor: torch.Tensor
    value: Storable
    group: dict[str, Any]


class OptimizerState(NamedTuple):
    """One torch optimizer under its key in the state, with the names of everything it may hold."""

    key: str
    optimizer: torch.optim.Optimizer
    names: Mapping[int, tuple[str, Storable]]

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP, MASTER_GROUP})

    def parameters(self) -> Iterator[Parameter]:
        """Its parameters in order; `InvalidRequest`, by position, for one that belongs to nothing in the state."""
        for position, group in enumerate(self.optimizer.param_groups):
            for index, tensor in enumerate(group["params"]):
                if id(tensor) not in self.names:
                    raise InvalidRequest(
                        f"{self.key}.param_groups[{position}]['params'][{index}], of shape {list(tensor.shape)}, "
                        "belongs to nothing in the state",
                        hint="hand over the module that owns it, or its full-precision copies as 'master'",
                    )
                name, value = self.names[id(tensor)]
                yield Parameter(name, tensor, value, group)

    def has_masters(self) -> bool:
        held = (self.optimizer.state.get(parameter.tensor, {}) for parameter in self.parameters())
        return any(not MASTER_KEYS.isdisjoint(state) for state in held)

    def tensors(self) -> Iterator[Storable]:
        """The live tensors of its state."""
        for kept in self.optimizer.state.values():
            yield from (value for value in kept.values() if isinstance(value, torch.Tensor))

    def collect(self, content: Content) -> None:
        """Add every state tensor under its parameter's name, and the document with all that is not a tensor."""
        self.collect_tensors(content).collect(content)

    def collect_tensors(self, content: Content) -> OptimizerDocument:
        """Add every state tensor; what the document says of them, until there are others, comes back."""
        parameters = list(self.parameters())
        shards = self._shard_keys()
        document: dict[str, Any] = {"state": {}, "masters": {}, "kinds": {}}
        for parameter in parameters:
            for key, value in self._state_of(parameter).items():
                if not isinstance(value, torch.Tensor):
                    document["state"].setdefault(parameter.name, {})[key] = value
                    continue
                group, name = _target(parameter, key, value)
                if kind := _kind(parameter, value, key in shards):
                    document["kinds"].setdefault(key, kind)
                if group == MASTER_GROUP:
                    document["masters"].setdefault(key, []).append(parameter.name)
                if not _holds(content, (group, name), value):  # the mapping `master` may hold this very tensor
                    content.add(group, name, *_placed(parameter, value, key in shards))
        return OptimizerDocument(self, document)

    def plan(self, stored: Stored, selection: Selection) -> Plan:
        """Want the live state and what a fresh optimizer lacks of the stored one, to be installed once filled.

        Nothing of the optimizer changes before the plan's actions run. A parameter without stored and without live
        state (frozen, never stepped) stays as it is.
        """
        plan = Plan()
        if selection.takes(GROUP, self.key):
            plan.documents.append((GROUP, self.key))
        text = stored.value(GROUP, self.key)
        if text is None or not selection.takes(GROUP, self.key):
            self._want_live(plan, selection, set())
            return plan
        return _Resumption(self, stored, selection, plan).prepare(text)

    def _want_live(self, plan: Plan, selection: Selection, done: set[Key]) -> None:
        shards = self._shard_keys()
        for parameter in self.parameters():
            for key, value in self._state_of(parameter).items():
                if isinstance(value, torch.Tensor):
                    target = _target(parameter, key, value)
                    if target not in done and selection.takes(*target):
                        plan.want(*target, *_placed(parameter, value, key in shards))

    def _shard_keys(self) -> frozenset[str]:
        """Keys under which plain tensors are this rank's shards, as optimizers that work on local tensors keep them.

        A key is one of these if its tensors have the local shape of every sharded parameter: a single one may by chance.
        """
        alike: dict[str, bool] = {}
        for parameter in self.parameters():
            if not _is_sharded(parameter.value):
                continue
            local = tuple(local_tensor(parameter.value).shape)
            for key, value in self._state_of(parameter).items():
                if isinstance(value, torch.Tensor) and value.dim() and not is_dtensor(value):
                    alike[key] = alike.get(key, True) and tuple(value.shape) == local
        return frozenset(key for key, every in alike.items() if every)

    def _state_of(self, parameter: Parameter) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(parameter.tensor, {})
        for key in state:
            if not isinstance(key, str) or not key or "/" in key:
                raise InvalidRequest(f"{self.key}: the state of {parameter.name} has the key {key!r}, not a plain name")
        return state

    def _hyper(self) -> dict[str, dict[str, Any]]:
        foreign = [key for key in self.optimizer.state if not isinstance(key, torch.Tensor)]
        if foreign:
            raise InvalidRequest(f"{self.key}.state[{foreign[0]!r}] belongs to no parameter and cannot be stored")
        groups = {}
        for position, group in enumerate(self.optimizer.param_groups):
            names = [self.names[id(tensor)][0] for tensor in group["params"]]
            kept = {k: v for k, v in group.items() if k not in _IMPLEMENTATION}
            groups[names[0] if names else f"#{position}"] = {"params": names, **kept}
        return groups


class OptimizerDocument:
    """All of one optimizer that is not a tensor of its state, as JSON: hyper-parameters may change from save to save."""

    def __init__(self, state: OptimizerState, known: Mapping[str, Any]) -> None:
        self._state, self._known = state, known
        kept = [value for values in known["state"].values() for value in values.values()]
        self._constant = all(type(value) in _SCALARS for value in kept)
        self._written: tuple[str, trees.Tree] | None = None

    def collect(self, content: Content) -> None:
        """Add the document, written anew where anything in it may be another."""
        hyper = [{k: v for k, v in group.items() if k != "params"} for group in self._state.optimizer.param_groups]
        plain = self._constant and all(_is_scalar(value) for group in hyper for value in group.values())
        seen = repr(hyper) if plain else ""
        if self._written is None or not plain or self._written[0] != seen:
            document = {"groups": self._state._hyper(), **self._known}
            self._written = seen, trees.grow(document, self._state.key, self._state.key)
        tree = self._written[1]
        content.add_value(GROUP, self._state.key, tree.text)
        for name, tensor in tree.tensors.items():
            content.add(GROUP, name, tensor)


def _is_scalar(value: object) -> bool:
    return all(type(item) in _SCALARS for item in (value if type(value) is tuple else (value,)))


class _Resumption:
    """One optimizer and one checkpoint's document of it, on the way to a plan."""

    def __init__(self, state: OptimizerState, stored: Stored, selection: Selection, plan: Plan) -> None:
        self.state = state
        self.stored = stored
        self.selection = selection
        self.plan = plan
        self.shards = state._shard_keys()
        self.done: set[Key] = set()
        self.created: list[tuple[torch.Tensor, str, torch.Tensor]] = []

    def prepare(self, text: str) -> Plan:
        key = self.state.key
        regrown = trees.regrow(text, key, partial(self.stored.spec, GROUP), {})
        self.plan.missing += [f"{GROUP}/{name}" for name in regrown.unknown]
        for name, tensor in regrown.tensors.items():
            self.plan.want(GROUP, name, tensor)
        self.plan.claimed |= {(GROUP, name) for name in regrown.tensors}
        if regrown.unknown:
            return self.plan
        document = regrown.build()
        if not isinstance(document, dict) or not {"groups", "state", "masters", "kinds"} <= set(document):
            raise CorruptManifest(f"the stored value of {key} is not an optimizer's", file="state.json")
        parameters = {parameter.name: parameter for parameter in self.state.parameters()}
        self._tensors(parameters, document["kinds"])
        self._masters(parameters, document["masters"], document["kinds"])
        self._values(parameters, document["state"])
        self.state._want_live(self.plan, self.selection, self.done)
        hyper = self._hyper(document["groups"])
        self.plan.actions.append(lambda: self._install(parameters, document["state"], hyper))
        return self.plan

    def _tensors(self, parameters: Mapping[str, Parameter], kinds: Mapping[str, str]) -> None:
        for name in self.stored.specs.get(GROUP, {}):
            owner, _, key = name.rpartition("/")
            if owner in parameters and (GROUP, name) not in self.plan.claimed and self.selection.takes(GROUP, name):
                self._claim(parameters[owner], key, (GROUP, name), kinds.get(key, ""))

    def _values(self, parameters: Mapping[str, Parameter], stored: Mapping[str, Mapping[str, Any]]) -> None:
        for name, parameter in parameters.items():
            for key, value in self.state._state_of(parameter).items():
                if not isinstance(value, torch.Tensor) and key not in stored.get(name, {}):
                    self.plan.missing.append(f"{GROUP}/{name}/{key}")

    def _masters(
        self, parameters: Mapping[str, Parameter], masters: Mapping[str, list[str]], kinds: Mapping[str, str]
    ) -> None:
        for key, names in masters.items():
            for name in names:
                stored = self.stored.spec(MASTER_GROUP, name) is not None
                if name in parameters and stored and self.selection.takes(MASTER_GROUP, name):
                    self._claim(parameters[name], key, (MASTER_GROUP, name), kinds.get(key, ""))
                elif name in parameters and key not in self.state._state_of(parameters[name]):
                    self.plan.notes.append(
                        f"{self.state.key}: {name} is restored without its {key}, which is in group master"
                    )

    def _claim(self, parameter: Parameter, key: str, target: Key, kind: str) -> None:
        """Fill the live tensor under this key, or a new one made after the stored spec."""
        self.done.add(target)
        live = self.state._state_of(parameter).get(key)
        spec = self.stored.spec(*target)
        assert spec is not None
        made = Made(live, key in self.shards) if isinstance(live, torch.Tensor) else None
        if made is None:
            made = _fresh(parameter, key, (torch_dtype(spec[0], target[1]), spec[1]), kind)
            self.created.append((parameter.tensor, key, made.tensor))
        self.plan.want(*target, *_placed(parameter, *made))

    def _hyper(self, groups: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
        """Per live group the stored hyper-parameters: of the stored group that its first known parameter was in."""
        by_name = {name: group for group in groups.values() for name in group["params"]}
        chosen = []
        for position, group in enumerate(self.state.optimizer.param_groups):
            names = [self.state.names[id(p)][0] for p in group["params"]]
            found = [by_name[name] for name in names if name in by_name]
            where = f"{self.state.key}.param_groups[{position}]"
            hypers = [
                {k: v for k, v in entry.items() if k not in _IMPLEMENTATION} for entry in {id(f): f for f in found}.values()
            ]
            if not hypers and names:
                self.plan.notes.append(f"{where}: none of its parameters is in the checkpoint, its hyper-parameters stay")
            if any(not _agree(hyper, hypers[0]) for hyper in hypers):
                self.plan.notes.append(
                    f"{where}: its parameters were in groups that differ, the first one's values are taken"
                )
            chosen.append(hypers[0] if hypers else {})
        return chosen

    def _install(
        self, parameters: Mapping[str, Parameter], values: Mapping[str, Mapping[str, Any]], hyper: list[dict[str, Any]]
    ) -> None:
        # Not through load_state_dict: it would cast every state tensor to its parameter's dtype.
        state = self.state.optimizer.state
        for tensor, key, value in self.created:
            state[tensor][key] = value
        for name, kept in values.items():
            if name in parameters:
                tensor = parameters[name].tensor
                state[tensor].update(tree_map_only(torch.Tensor, partial(_moved, tensor.device), kept))
        for group, stored in zip(self.state.optimizer.param_groups, hyper, strict=True):
            for key, value in stored.items():
                group[key] = _merged(group.get(key), value)


def _moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device)


def _merged(live: Any, value: Any) -> Any:
    """The stored hyper-parameter in the live one's kind: a tensor keeps its identity, for schedulers and graphs hold it."""
    if isinstance(live, torch.Tensor) and isinstance(value, float | int | torch.Tensor):
        with torch.no_grad():
            return live.copy_(torch.as_tensor(value))
    if isinstance(live, float | int) and isinstance(value, torch.Tensor) and value.numel() == 1:
        return type(live)(value.item())
    return value


def _agree(a: dict[str, Any], b: dict[str, Any]) -> bool:
    # Tensors among them are not filled yet when this is asked; numbers and text decide.
    plain = [{k: repr(v) for k, v in hyper.items() if not isinstance(v, torch.Tensor)} for hyper in (a, b)]
    return plain[0] == plain[1]


def _holds(content: Content, key: Key, value: torch.Tensor) -> bool:
    """Whether a leaf of this name is this tensor's memory already."""
    leaf, memory = content.leaves.get(key), local_tensor(value).untyped_storage().data_ptr()
    return leaf is not None and all(piece.tensor.untyped_storage().data_ptr() == memory for piece in leaf.pieces)


def _placed(parameter: Parameter, value: torch.Tensor, shard: bool) -> tuple[Storable, torch.Tensor | None]:
    """The state tensor as it lies: by itself, or as memory in the place of its parameter."""
    shard = shard and bool(value.dim()) and _is_sharded(parameter.value) and not is_dtensor(value)
    return (parameter.value, local_tensor(value)) if shard else (value, None)


def _is_master(parameter: Parameter, key: str, value: torch.Tensor) -> bool:
    return key in MASTER_KEYS and value.numel() in (parameter.tensor.numel(), local_tensor(parameter.value).numel())


def _target(parameter: Parameter, key: str, value: torch.Tensor) -> Key:
    return (MASTER_GROUP, parameter.name) if _is_master(parameter, key, value) else (GROUP, f"{parameter.name}/{key}")


def _is_sharded(value: Storable) -> bool:
    return isinstance(value, Fragment) or is_dtensor(value)


def _kind(parameter: Parameter, value: torch.Tensor, shard: bool) -> str:
    """What a restore must know to make such a tensor anew, where shape alone would suggest another."""
    if not is_dtensor(parameter.value):
        return ""
    alike = tuple(value.shape) == global_shape(parameter.value)
    if is_dtensor(value):
        return "" if alike else MESH
    if shard:
        return LOCAL
    return PLAIN if alike and value.dim() else ""


class Made(NamedTuple):
    """A state tensor and whether it is, though plain, this rank's shard of the state of a sharded parameter."""

    tensor: torch.Tensor
    shard: bool


def _fresh(parameter: Parameter, key: str, spec: tuple[torch.dtype, Shape], kind: str) -> Made:
    """A state tensor as the optimizer would have made it itself, to be filled whole."""
    dtype, shape = spec[0], local_shape(*spec)
    value, held = parameter.value, parameter.tensor.detach()
    if key == "step" and not shape:
        on_device = parameter.group.get("capturable") or parameter.group.get("fused")
        return Made(torch.zeros((), dtype=dtype, device=held.device if on_device else "cpu"), False)
    if shape == global_shape(value) and kind != PLAIN:
        shard = kind == LOCAL or isinstance(value, Fragment)
        return Made(torch.empty_like(local_tensor(value) if shard else held, dtype=dtype), shard)
    plain = torch.empty(shape, dtype=dtype, device=held.device)
    if kind == MESH and is_dtensor(held):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = held.device_mesh  # type: ignore[attr-defined]
        plain = DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return Made(plain, False)

"""Puts a checkpoint's optimizer state into live optimizers: into existing tensors, or new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from holdfast.left_out import LeftOutNote
from holdfast.state.containers import ContainerKeeper
from holdfast.state.hyper_parameters import LiveGroups, chosen, given_to
from holdfast.state.modules import MODEL
from holdfast.state.optimizers import (
    GROUP,
    LOCAL,
    MASTER_GROUP,
    MESH,
    PLAIN,
    OptimizerState,
    Parameter,
    is_elsewhere,
    placed,
)
from holdfast.tensors import casting, trees, wrapped
from holdfast.tensors.fragments import Fragment, FragmentList, global_shape, is_dtensor
from holdfast.tensors.leaves import Key, LackingCopy, OfferedLeaves, PartPlan, Selection
from holdfast.tensors.optimizer_documents import WRAPPED
from holdfast.tensors.torch_dtypes import local_shape, safetensors_name, torch_dtype
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.region import Shape

OTHER_OPTIMIZER = "use the optimizer that was saved; or leave its state out: restore(groups=…)"


def plan(state: OptimizerState, stored: OfferedLeaves, selection: Selection, keeper: ContainerKeeper) -> PartPlan:
    """Want the live state, and stored state that a fresh optimizer lacks; the latter is installed once it is filled.

    The optimizer does not change before the plan's actions run. A parameter with neither stored nor live state (frozen,
    never stepped) stays as it is.
    """
    made = PartPlan()
    if selection.takes(GROUP, state.key):
        made.documents.append((GROUP, state.key))
    text = stored.value(GROUP, state.key)
    if text is None or not selection.takes(GROUP, state.key):
        state.want_live(made, selection, set())
        return made
    return _Resumption(state, stored, selection, made, keeper).prepare(text)


def under_key(stored: OfferedLeaves, keys: Sequence[str]) -> OfferedLeaves:
    """An imported checkpoint with its optimizer under the live one's key, which another program names differently, and a
    note.

    Only if there is one optimizer in both, because nothing else matches them.
    """
    there = stored.values.get(GROUP, {})
    if not stored.imported or len(keys) != 1 or len(there) != 1 or keys[0] in there:
        return stored
    ((key, text),) = there.items()
    note = f"{GROUP}/{keys[0]} is what the checkpoint, which was imported, has as {GROUP}/{key}"
    return stored._replace(values={**stored.values, GROUP: {keys[0]: text}}, notes=(*stored.notes, note))


class _Resumption:
    """Builds a plan from the optimizers of one key and a checkpoint's document of them."""

    def __init__(
        self, state: OptimizerState, stored: OfferedLeaves, selection: Selection, plan: PartPlan, keeper: ContainerKeeper
    ) -> None:
        self.state = state
        self.stored = stored
        self.selection = selection
        self.plan = plan
        self.keeper = keeper
        self.shards = state.shard_keys()
        self.done: set[Key] = set()
        self.created: list[tuple[Parameter, str, torch.Tensor]] = []
        self.wrapping: dict[tuple[str, str], tuple[type[torch.Tensor], wrapped.Description]] = {}  # to be put together

    def prepare(self, text: str) -> PartPlan:
        document = read_document(text, self.state.key, self.stored, self.plan)
        if document is None:
            return self.plan
        parameters = {parameter.name: parameter for parameter in self.state.parameters()}
        self._wrappers(parameters, document.get(WRAPPED, {}))
        self._tensors(parameters, document["kinds"])
        self._masters(parameters, document["masters"], document["kinds"])
        self._values(parameters, document["state"])
        self.state.want_live(self.plan, self.selection, self.done)
        groups = list(self.state.groups_of_parameters())
        names = [[self.state.names[id(tensor)][0] for tensor in group["params"]] for group in groups]
        live = LiveGroups(self.state.key, names, groups, given_to(self.state.optimizers))
        hyper = chosen(live, document, self.plan, self.selection)
        self.plan.actions.append(lambda: self._install(parameters, document["state"], hyper))
        return self.plan

    def _tensors(self, parameters: Mapping[str, Parameter], kinds: Mapping[str, str]) -> None:
        for name in self.stored.specs.get(GROUP, {}):
            owner, _, key = name.rpartition("/")
            if owner in parameters and (GROUP, name) not in self.plan.claimed and self.selection.takes(GROUP, name):
                self._claim(parameters[owner], key, (GROUP, name), kinds.get(key, ""))

    def _wrappers(self, parameters: Mapping[str, Parameter], stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Wrapper tensors are filled in place if they match the stored ones, or rebuilt; else `StateMismatch`."""
        for name, kept in stored.items():
            for key, found in kept.items():
                path = f"{self.state.key}: {name}/{key}"
                said = wrapped.check_description(found, path)
                inner = [(GROUP, f"{name}/{key}.{attribute}") for attribute in said["inner"]]
                if name not in parameters or not any(self.selection.takes(*one) for one in inner):
                    continue
                live = parameters[name].optimizer.state.get(parameters[name].tensor, {}).get(key)
                if live is not None:
                    wrapped.check_alike(live, said, path)
                elif lacking := [one for one in inner if not self.selection.takes(*one) or self.stored.spec(*one) is None]:
                    raise StateMismatch(f"{path} is not restored as a whole: {lacking[0][1]} is left out, or not there")
                else:
                    self.wrapping[name, key] = wrapped.find_class(said, path), said
        for parameter, key, value in self.state.wrappers():
            plain = (GROUP, f"{parameter.name}/{key}")
            if self.stored.spec(*plain) is not None and self.selection.takes(*plain):
                other = f"a plain tensor was stored, but the live one is a {type(value).__name__}"
                raise StateMismatch(f"{self.state.key}: {parameter.name}/{key}: {other}", hint=OTHER_OPTIMIZER)

    def _values(self, parameters: Mapping[str, Parameter], stored: Mapping[str, Mapping[str, Any]]) -> None:
        for name, parameter in parameters.items():
            for key, value in self.state.state_of(parameter).items():
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
                elif name in parameters and key not in self.state.state_of(parameters[name]):
                    self._lack(parameters[name], key, kinds.get(key, ""))

    def _lack(self, parameter: Parameter, key: str, kind: str) -> None:
        """The saved optimizer had a copy of this parameter. One without state needs one to continue; one with state but
        without a copy keeps none.
        """
        dtype = stored_dtype(self.stored, parameter.name)
        if self.state.state_of(parameter) or dtype.itemsize <= parameter.tensor.dtype.itemsize:
            text = f"{self.state.key}: {parameter.name} is restored without its {key}, because group master is not restored"
            self.plan.notes.append(LeftOutNote(text))
        elif not is_elsewhere(parameter):
            made = _fresh(parameter, key, dtype, global_shape(parameter.value), kind).tensor
            self.created.append((parameter, key, made))
            weight = parameter.tensor if isinstance(parameter.value, FragmentList) else parameter.value
            self.plan.lacking.append(LackingCopy(parameter.name, weight, made))

    def _claim(self, parameter: Parameter, key: str, target: Key, kind: str) -> None:
        """Fill the live tensor under this key, or a new one made from the stored spec."""
        self.done.add(target)
        live = self.state.state_of(parameter).get(key)
        if live is None and target[0] == GROUP and is_elsewhere(parameter):
            self.plan.claimed.add(target)  # a rank that never steps a parameter has no state of it
            return
        spec = self.stored.spec(*target)
        assert spec is not None
        made = Made(live, key in self.shards) if isinstance(live, torch.Tensor) else None
        if made is None and (parameter.name, key.rpartition(".")[0]) in self.wrapping:
            dtype = torch_dtype(spec[0], target[1])
            made = Made(torch.empty(local_shape(dtype, spec[1]), dtype=dtype, device=parameter.tensor.device), False)
            self.created.append((parameter, key, made.tensor))
        elif made is None:
            made = _fresh(parameter, key, self._dtype_to_make(parameter, *spec, target), spec[1], kind)
            self.created.append((parameter, key, made.tensor))
        self.plan.want(*target, *placed(parameter, *made))

    def _dtype_to_make(self, parameter: Parameter, stored: str, shape: Shape, target: Key) -> torch.dtype:
        """The stored dtype. With `cast`, state that torch's optimizers keep in their parameter's dtype has the live one's:
        their step refuses another.
        """
        dtype, live = torch_dtype(stored, target[1]), parameter.tensor.dtype
        inner = parameter.name.partition(".")
        weight = self.stored.spec(MODEL, parameter.name) or self.stored.spec(inner[0], inner[2])
        alike = weight is not None and weight[0] == stored and shape and target[0] == GROUP
        own = type(parameter.optimizer).__module__.startswith("torch.optim.")
        if self.selection.cast and alike and own and casting.possible(stored, safetensors_name(live)):
            return live
        return dtype

    def _install(
        self, parameters: Mapping[str, Parameter], values: Mapping[str, Mapping[str, Any]], hyper: list[dict[str, Any]]
    ) -> None:
        # Not with load_state_dict: it would cast every state tensor to its parameter's dtype.
        inside: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        for parameter, key, value in self.created:
            outer, _, attribute = key.rpartition(".")
            if (parameter.name, outer) in self.wrapping:
                inside.setdefault((parameter.name, outer), {})[attribute] = value
            else:
                parameter.optimizer.state[parameter.tensor][key] = value
        for (name, key), tensors in inside.items():
            owner, path = parameters[name], f"{self.state.key}: {name}/{key}"
            owner.optimizer.state[owner.tensor][key] = wrapped.build(*self.wrapping[name, key], tensors, path)
        for name, kept in values.items():
            if name in parameters:
                tensor = parameters[name].tensor
                self._put(
                    parameters[name].optimizer.state[tensor],
                    tree_map_only(torch.Tensor, partial(_moved, tensor.device), kept),
                    name,
                )
        for group, stored in zip(self.state.groups_of_parameters(), hyper, strict=True):
            self._put(group, {key: merged(group.get(key), value) for key, value in stored.items()}, "param_groups")

    def _put(self, live: dict[str, Any], values: Mapping[str, Any], where: str) -> None:
        for key, value in values.items():
            live[key] = self.keeper.put(live.get(key), value, f"{self.state.key}/{where}/{key}")


def stored_dtype(stored: OfferedLeaves, name: str) -> torch.dtype:
    """The dtype of a parameter's full-precision copy in the checkpoint, or the most common one if it was not stored."""
    spec = stored.spec(MASTER_GROUP, name)
    return torch.float32 if spec is None else torch_dtype(spec[0], name)


def read_document(text: str, key: str, stored: OfferedLeaves, plan: PartPlan) -> dict[str, Any] | None:
    """The stored document of the optimizer `key`, whose tensors the plan fills; None if the checkpoint lacks one of them."""
    regrown = trees.regrow(text, key, partial(stored.spec, GROUP), {})
    plan.missing += [f"{GROUP}/{name}" for name in regrown.unknown]
    for name, tensor in regrown.tensors.items():
        plan.want(GROUP, name, tensor)
    plan.claimed |= {(GROUP, name) for name in regrown.tensors}
    if regrown.unknown:
        return None
    document = regrown.build()
    if not isinstance(document, dict) or not {"groups", "state", "masters", "kinds"} <= set(document):
        raise CorruptManifest(f"the stored value of {key} is not an optimizer state", file="state.json")
    return document


def _moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device)


def merged(live: Any, value: Any) -> Any:
    """The stored hyper-parameter in the type of the live one. A tensor keeps its identity, because schedulers and graphs
    hold it.
    """
    if isinstance(live, torch.Tensor) and isinstance(value, float | int | torch.Tensor):
        with torch.no_grad():
            return live.copy_(torch.as_tensor(value))
    if isinstance(live, float | int) and isinstance(value, torch.Tensor) and value.numel() == 1:
        return type(live)(value.item())
    return value


class Made(NamedTuple):
    """A state tensor; `shard`: though plain, it is this rank's shard of the state of a sharded parameter."""

    tensor: torch.Tensor
    shard: bool


def _fresh(parameter: Parameter, key: str, dtype: torch.dtype, whole: Shape, kind: str) -> Made:
    """A state tensor as the optimizer would have made it itself, to be filled completely."""
    shape = local_shape(dtype, whole)
    value, held = parameter.value, parameter.tensor.detach()
    if key == "step" and not shape:
        on_device = parameter.group.get("capturable") or parameter.group.get("fused")
        return Made(torch.zeros((), dtype=dtype, device=held.device if on_device else "cpu"), False)
    if shape == global_shape(value) and kind != PLAIN:
        if isinstance(value, FragmentList):
            return Made(torch.zeros_like(held, dtype=dtype), True)  # padding is in no Fragment and stays 0
        shard = kind == LOCAL or isinstance(value, Fragment)
        return Made(torch.empty_like(parameter.local if shard else held, dtype=dtype), shard)
    plain = torch.empty(shape, dtype=dtype, device=held.device)
    if kind == MESH and is_dtensor(held):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = held.device_mesh  # type: ignore[attr-defined]
        plain = DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return Made(plain, False)

"""Puts a checkpoint's optimizer state into live optimizers: into existing tensors, or new ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from holdfast.left_out import LeftOutNote
from holdfast.state.containers import ContainerKeeper
from holdfast.state.hyper_parameters import LiveGroups, chosen
from holdfast.state.modules import MODEL
from holdfast.state.optimizer_entries import OptimizerEntry
from holdfast.state.optimizer_shards import ShardedOptimizer, ShardParameter
from holdfast.state.optimizers import KeyedOptimizers, Parameter
from holdfast.state.partitioned.live import blocks_of
from holdfast.state.partitioned.resume import BlockResume, stored_keys, stored_wrapper
from holdfast.state.state_tensors import GROUP, MASTER_GROUP, NewTensor, device_of, is_storable, want_live
from holdfast.tensors import casting, numbered_parameters, registered, trees, wrapped
from holdfast.tensors.fragments import global_shape, is_sharded, local_tensors
from holdfast.tensors.leaves import Key, LackingCopy, OfferedLeaves, PartPlan, Selection
from holdfast.tensors.optimizer_documents import BLOCKS, IDLE, WRAPPED
from holdfast.tensors.torch_dtypes import local_shape, safetensors_name, torch_dtype
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.region import Shape

LISTED_MAX = 5
OTHER_OPTIMIZER = "use the optimizer that was saved, or leave its state out: restore(groups=…)"


def plan(state: OptimizerEntry, stored: OfferedLeaves, selection: Selection, keeper: ContainerKeeper) -> PartPlan:
    """Want the live state, and stored state that a fresh optimizer lacks; the latter is installed once it is filled.

    The optimizer does not change before the plan's actions run. A parameter with neither stored nor live state (frozen,
    never stepped) stays as it is.
    """
    part_plan = PartPlan()
    if selection.takes(GROUP, state.key):
        part_plan.documents.append((GROUP, state.key))
    text = stored.value(GROUP, state.key)
    if text is None or not selection.takes(GROUP, state.key):
        want_live(state.entries(), part_plan, selection, ())
        _claim_masters_elsewhere(state, stored, selection, part_plan)
        return part_plan
    return _Resumption(state, stored, selection, part_plan, keeper).prepare(text)


def _claim_masters_elsewhere(state: OptimizerEntry, stored: OfferedLeaves, selection: Selection, plan: PartPlan) -> None:
    """Claim the masters that other ranks keep, such as those of another pipeline stage, when no other state is restored."""
    if isinstance(state, ShardedOptimizer) and not state.has_masters():  # a fresh one may yet keep them here
        return
    for parameter in state.parameters():
        spec, target = stored.spec(MASTER_GROUP, parameter.name), (MASTER_GROUP, parameter.name)
        if spec is not None and not parameter.kept and selection.takes(*target) and _is_elsewhere(parameter, *spec):
            plan.claimed.add(target)


def _is_elsewhere(parameter: Parameter | ShardParameter, dtype: str, shape: Shape) -> bool:
    """Whether other ranks keep all of the master of a parameter."""
    if isinstance(parameter, Parameter):
        return parameter.is_elsewhere
    made = parameter.fresh(MASTER_GROUP, torch_dtype(dtype, parameter.name), shape, "")
    return not any(local.numel() for local in local_tensors(made.value))


def under_key(stored: OfferedLeaves, keys: Sequence[str]) -> OfferedLeaves:
    """An imported checkpoint with its optimizer under the live one's key, which another program names differently, and a
    note.

    Only if there is one optimizer in both, because nothing else matches them.
    """
    groups = stored.values.get(GROUP, {})
    if not stored.imported or len(keys) != 1 or len(groups) != 1 or keys[0] in groups:
        return stored
    ((key, text),) = groups.items()
    note = f"{GROUP}/{keys[0]} is restored from {GROUP}/{key} of the imported checkpoint"
    return stored._replace(values={**stored.values, GROUP: {keys[0]: text}}, notes=(*stored.notes, note))


def with_names(stored: OfferedLeaves, optimizers: Sequence[OptimizerEntry], declared: bool) -> OfferedLeaves:
    """An imported checkpoint whose optimizers number their parameters, with the live ones' names of these.

    Raises `StateMismatch` if they do not fit, and with a declared layout, which splits tensors by name.
    """
    for one in optimizers:
        if not numbered_parameters.is_numbered(stored, one.key):
            continue
        if declared:
            raise StateMismatch(
                f"{one.key}: the imported optimizer has numbers in place of names, which no layout can divide",
                hint="restore it once without layout=, save it, and restore that checkpoint with layout=",
            )
        shapes = {parameter.name: tuple(global_shape(parameter.value)) for parameter in one.parameters()}
        groups = [{name: shapes[name] for name in names} for names in one.names_of_groups()]
        stored = numbered_parameters.named(stored, one.key, groups)
    return stored


class _Wrapping(NamedTuple):
    """A wrapper tensor that is put together from its inner tensors."""

    kind: type[torch.Tensor]
    said: wrapped.Description
    inner: dict[str, torch.Tensor]


class _Resumption:
    """Builds a plan from an optimizer (all that are under one key) and a checkpoint's document of it."""

    def __init__(
        self, state: OptimizerEntry, stored: OfferedLeaves, selection: Selection, plan: PartPlan, keeper: ContainerKeeper
    ) -> None:
        self.state = state
        self.stored = stored
        self.selection = selection
        self.plan = plan
        self.keeper = keeper
        self.parameters = {parameter.name: parameter for parameter in state.parameters()}
        self.kept = state.kept
        self.live = {(entry.name, entry.key): entry for entry in state.entries()}
        self.done: set[Key] = set()
        self.created: dict[str, dict[str, Any]] = {}  # new tensors, by name and key
        self.values: dict[str, dict[str, Any]] = {}  # what is no tensor, by name and key
        self.numbers: list[tuple[str, str, torch.Tensor]] = []  # stored as tensors, and plain numbers in the live state
        self.filled: list[tuple[torch.Tensor, Any]] = []  # live tensors, and the plain numbers that are stored for them
        self.wrapping: dict[tuple[str, str], _Wrapping] = {}  # to be put together
        self.whole: list[str] = []  # new tensors that every rank has whole, of sharded parameters that were not sharded
        self.blocks: BlockResume | None = None  # where there are any to be looked for
        self.objects = False  # whether the document has objects of registered classes

    def prepare(self, text: str) -> PartPlan:
        document = read_document(text, self.state.key, self.stored, self.plan, self._nested(text))
        if document is None:
            return self.plan
        self.objects = '"$object"' in text
        if self.selection.requantise or BLOCKS in document or any(is_sharded(one.value) for one in self.parameters.values()):
            self.blocks = self._blocks(document)
            self.done |= self.blocks.done
        self._wrappers(document.get(WRAPPED, {}))
        for name in self.stored.specs.get(GROUP, {}):
            owner, _, key = name.rpartition("/")
            if owner in self.kept and (GROUP, name) not in self.plan.claimed and self.selection.takes(GROUP, name):
                self._claim(owner, key, (GROUP, name), document["kinds"].get(key, ""))
        self._masters(document["masters"], document["kinds"])
        self._values(document["state"])
        want_live(self.live.values(), self.plan, self.selection, self.done)
        if self.whole:
            self.plan.notes.append(_whole_note(self.state.key, self.whole))
        groups = list(self.state.groups_of_parameters())
        live = LiveGroups(self.state.key, self.state.names_of_groups(), groups, self.state.user_given())
        hyper = chosen(live, document, self.plan, self.selection)
        if isinstance(self.state, ShardedOptimizer):
            self.state.check(hyper, {name: {*self.created.get(name, ()), *self.values.get(name, ())} for name in self.kept})
        self.plan.actions.append(lambda: self._install(hyper))
        if (idle := frozenset(document.get(IDLE, ()))) and isinstance(self.state, KeyedOptimizers):
            without = idle & {name for name, kept in self.kept.items() if not kept}
            self.plan.actions.append(partial(self.state.note_restored_for_all, without))
        return self.plan

    def _nested(self, text: str) -> dict[str, torch.Tensor]:
        """New tensors, by stored name, for those in containers of the state of parameters in a mesh or on a device."""
        prefix = f"{self.state.key}/state/"
        names = [name for name in self.stored.specs.get(GROUP, {}) if name.startswith(prefix)]
        kinds = json.loads(text).get("kinds", {}) if names else {}
        made = {}
        for name in names:
            owner, _, inside = name.removeprefix(prefix).partition("/")
            parameter, key = self.parameters.get(owner), inside.partition("/")[0]
            spec = self.stored.spec(GROUP, name)
            if isinstance(parameter, Parameter) and spec is not None and self.selection.takes(GROUP, name):
                dtype = torch_dtype(spec[0], name)
                made[name] = parameter.fresh(inside, dtype, spec[1], kinds.get(key, "")).given
        return made

    def _wrappers(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Wrapper tensors are filled in place if they match the stored ones, or rebuilt; else `StateMismatch`."""
        wrappers = {(name, key): value for name, key, value in self.state.wrappers()}
        for name, kept in stored.items():
            for key, found in kept.items():
                path = f"{self.state.key}: {name}/{key}"
                description = wrapped.check_description(found, path)
                inner = [(GROUP, f"{name}/{key}.{attribute}") for attribute in description["inner"]]
                taken = (GROUP, f"{name}/{key}") in self.done
                if taken or name not in self.kept or not any(self.selection.takes(*one) for one in inner):
                    continue
                if is_sharded(self.parameters[name].value):
                    raise StateMismatch(
                        f"{path} was stored in a wrapper tensor not known to be in blocks, and its parameter is sharded",
                        hint="leave the optimizer's state out: restore(groups=…)",
                    )
                live = wrappers.get((name, key), self.kept[name].get(key))
                if live is not None:
                    wrapped.check_alike(live, description, path)
                elif lacking := [one for one in inner if not self.selection.takes(*one) or self.stored.spec(*one) is None]:
                    raise StateMismatch(
                        f"{path} is not restored as a whole: {lacking[0][1]} is left out or missing",
                        hint="restore all of it, or leave the optimizer's state out: restore(groups=…)",
                    )
                else:
                    self.wrapping[name, key] = _Wrapping(wrapped.find_class(description, path), description, {})
        for (name, key), value in wrappers.items():
            plain = (GROUP, f"{name}/{key}")
            if self.stored.spec(*plain) is not None and self.selection.takes(*plain) and plain not in self.done:
                other = f"a plain tensor was stored, but the live one is a {type(value).__name__}"
                raise StateMismatch(f"{self.state.key}: {name}/{key}: {other}", hint=OTHER_OPTIMIZER)

    def _blocks(self, document: Mapping[str, Any]) -> BlockResume:
        """Blocks of codes of parameters that are cut, now or when they were stored; others are restored tensor by tensor."""
        blocks = BlockResume(self.state.key, self.stored, self.selection, self.plan, self.keeper)
        described, cut, kinds = document.get(WRAPPED, {}), document.get(BLOCKS, {}), document["kinds"]
        names = self._stored_keys()
        for parameter in self.parameters.values():
            keys = names.get(parameter.name, {})
            if not isinstance(parameter, Parameter) or not any(self.selection.takes(*target) for target in keys.values()):
                continue
            parts = cut.get(parameter.name, {})
            found = stored_keys(self.stored, parameter.name, keys, parts)
            for key, of in described.get(parameter.name, {}).items():
                known = wrapped.check_description(of, f"{self.state.key}: {parameter.name}/{key}")
                one = stored_wrapper(self.stored, parameter.name, key, known, parts.get(key))
                found += [] if one is None else [one]
            again = self.selection.requantise or is_sharded(parameter.value)
            for one in found:
                if again or one.parts.key in parts:
                    blocks.take(parameter, one, kinds.get(one.parts.codes, ""))
            for live in blocks_of(parameter, parameter.kept, f"{self.state.key}: {parameter.name}") if again else ():
                if live.wrapper is not None and live.parts.key in keys:
                    blocks.take_plain(parameter, live.parts.key, live)
        return blocks

    def _stored_keys(self) -> dict[str, dict[str, Key]]:
        """The keys of stored tensors, by parameter."""
        found: dict[str, dict[str, Key]] = {}
        for name in self.stored.specs.get(GROUP, {}):
            owner, _, key = name.rpartition("/")
            found.setdefault(owner, {})[key] = (GROUP, name)
        return found

    def _masters(self, masters: Mapping[str, list[str]], kinds: Mapping[str, str]) -> None:
        """Claim the full-precision copies, whatever key the saving optimizer had for them."""
        own = {entry.name: entry.key for entry in self.live.values() if entry.target[0] == MASTER_GROUP}
        for key, names in masters.items():
            for name in (name for name in names if name in self.kept):
                target = (MASTER_GROUP, name)
                if self.stored.spec(*target) is not None and self.selection.takes(*target):
                    self._claim(name, own.get(name, key), target, kinds.get(key, ""))
                elif name not in own:
                    self._lack(name, key, kinds.get(key, ""))
        if isinstance(self.state, ShardedOptimizer) and self.state.shards.makes_masters:
            for name in self.stored.specs.get(MASTER_GROUP, {}):
                target = (MASTER_GROUP, name)
                if name in self.kept and target not in self.done and name not in own and self.selection.takes(*target):
                    self._claim(name, MASTER_GROUP, target, "")

    def _lack(self, name: str, key: str, kind: str) -> None:
        """The saved optimizer had a copy of this parameter. One without state needs one to continue; one with state but
        without a copy keeps none.
        """
        parameter, dtype = self.parameters[name], stored_dtype(self.stored, name)
        if self.kept[name] or dtype.itemsize <= parameter.weight.dtype.itemsize:
            text = f"{self.state.key}: {name} is restored without its {key}, because group master is not restored"
            self.plan.notes.append(LeftOutNote(text))
        elif not parameter.is_elsewhere:
            tensor = self._create(name, key, dtype, global_shape(parameter.value), kind)
            self.plan.lacking.append(
                LackingCopy(name, parameter.weight, tensor.value if tensor.local is None else tensor.local)
            )

    def _create(self, name: str, key: str, dtype: torch.dtype, whole: Shape, kind: str) -> NewTensor:
        made = self.parameters[name].fresh(key, dtype, whole, kind)
        self.created.setdefault(name, {})[key] = made.given
        return made

    def _claim(self, name: str, key: str, target: Key, kind: str) -> None:
        """Fill the live tensor under this key, or a new one made from the stored spec."""
        self.done.add(target)
        live, parameter = self.kept[name].get(key), self.parameters[name]
        spec = self.stored.spec(*target)
        assert spec is not None
        dtype = torch_dtype(spec[0], target[1])
        outer, _, attribute = key.rpartition(".")
        if live is None and parameter.is_elsewhere:
            self.plan.claimed.add(target)  # a rank that never steps a parameter has no state of it
        elif (name, key) in self.live:
            self.plan.want(*target, self.live[name, key].value, self.live[name, key].local)
        elif (name, outer) in self.wrapping:
            part = torch.empty(local_shape(dtype, spec[1]), dtype=dtype, device=device_of(parameter.weight))
            self.wrapping[name, outer].inner[attribute] = part
            self.plan.want(*target, part)
        elif isinstance(live, bool | int | float) and not local_shape(dtype, spec[1]):
            self.numbers.append((name, key, torch.zeros((), dtype=dtype)))
            self.plan.want(*target, self.numbers[-1][2])
        else:
            if is_sharded(parameter.value) and not kind and spec[1] and spec[1] != global_shape(parameter.value):
                self.whole.append(f"{name}/{key}")
            claimed = self._create(name, key, self._dtype_to_make(parameter, *spec, target), spec[1], kind)
            self.plan.want(*target, claimed.value, claimed.local)

    def _dtype_to_make(self, parameter: Parameter | ShardParameter, stored: str, shape: Shape, target: Key) -> torch.dtype:
        """The stored dtype. With `cast`, state that torch's optimizers keep in their parameter's dtype has the live one's:
        their step refuses another.
        """
        live, inner = parameter.state_dtype, parameter.name.partition(".")
        weight = self.stored.spec(MODEL, parameter.name) or self.stored.spec(inner[0], inner[2])
        alike = weight is not None and weight[0] == stored and shape and target[0] == GROUP
        if self.selection.cast and alike and live is not None and casting.possible(stored, safetensors_name(live)):
            return live
        return torch_dtype(stored, target[1])

    def _values(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the stored JSON values, and live ones that the checkpoint lacks."""
        for name, kept in self.kept.items():
            offered = stored.get(name, {})
            self.values[name] = dict(offered)
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and not value.dim() and isinstance(offered.get(key), int | float):
                    self.filled.append((value, self.values[name].pop(key)))
                    self.done.add(self.live[name, key].target)
                elif not is_storable(value) and key not in offered and (GROUP, f"{name}/{key}") not in self.done:
                    self.plan.missing.append(f"{GROUP}/{name}/{key}")

    def _install(self, hyper: list[dict[str, Any]]) -> None:
        for name, key, number in self.numbers:
            self.values[name][key] = type(self.kept[name][key])(number.item())
        with torch.no_grad():
            for tensor, value in self.filled:
                tensor.fill_(value)
        for name, made_blocks in ({} if self.blocks is None else self.blocks.install()).items():
            self.created.setdefault(name, {}).update(made_blocks)
        for (name, key), one in self.wrapping.items():
            made = wrapped.build(one.kind, one.said, one.inner, f"{self.state.key}: {name}/{key}")
            self.created.setdefault(name, {})[key] = made
        for name, values in self.values.items():
            moved = tree_map_only(torch.Tensor, partial(_moved, device_of(self.parameters[name].weight)), values)
            self.created.setdefault(name, {}).update(self._put(self.kept[name], self._resolved(moved), name))
        groups = [
            self._put(
                live,
                {key: merged(live.get(key), self._resolved(value)) for key, value in restored.items()},
                f"param_groups[{at}]",
            )
            for at, (live, restored) in enumerate(zip(self.state.groups_of_parameters(), hyper, strict=True))
        ]
        self.state.install(groups, {name: values for name, values in self.created.items() if values})

    def _resolved(self, value: Any) -> Any:
        return registered.resolved(value) if self.objects else value

    def _put(self, live: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {key: self.keeper.put(live.get(key), v, f"{self.state.key}/{where}/{key}") for key, v in values.items()}


def _whole_note(optimizer: str, names: Sequence[str]) -> LeftOutNote:
    listed = ", ".join(names[:LISTED_MAX]) + ", …" * (len(names) > LISTED_MAX)
    return LeftOutNote(
        f"{optimizer}: {len(names)} tensors of another shape than their parameters ({listed}) are whole on every rank, as "
        "they were saved, though the parameters are sharded here: if the optimizer keeps only a part of them, let it take a "
        "step before restore(), or declare their parts with OptimizerShards"
    )


def stored_dtype(stored: OfferedLeaves, name: str) -> torch.dtype:
    """The dtype of a parameter's full-precision copy in the checkpoint, or the most common one if it was not stored."""
    spec = stored.spec(MASTER_GROUP, name)
    return torch.float32 if spec is None else torch_dtype(spec[0], name)


def read_document(
    text: str, key: str, stored: OfferedLeaves, plan: PartPlan, made: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> dict[str, Any] | None:
    """The stored document of the optimizer `key`, whose tensors the plan fills; None if the checkpoint lacks one of them.
    `made` has memory for some of its tensors.
    """
    regrown = trees.regrow(text, key, partial(stored.spec, GROUP), made)
    plan.missing += [f"{GROUP}/{name}" for name in regrown.unknown]
    for name, tensor in regrown.tensors.items():
        plan.want(GROUP, name, tensor)
    plan.claimed |= {(GROUP, name) for name in regrown.tensors}
    if regrown.unknown:
        return None
    document = regrown.build_before()
    if not isinstance(document, dict) or not {"groups", "state", "masters", "kinds"} <= set(document):
        raise CorruptManifest(
            f"the stored value of {key} is not an optimizer state",
            hint="restore another step, or leave the optimizer's state out: restore(groups=…)",
            file="state.json",
        )
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

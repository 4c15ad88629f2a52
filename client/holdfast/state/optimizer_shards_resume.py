"""Puts a checkpoint's optimizer state into an `OptimizerShards`: into existing tensors, or new ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.left_out import LeftOutNote
from holdfast.state.containers import ContainerKeeper
from holdfast.state.hyper_parameters import LiveGroups, chosen, given_to
from holdfast.state.optimizer_resume import merged, read_document, stored_dtype
from holdfast.state.optimizer_shards import ShardedOptimizer, checked, is_storable
from holdfast.state.optimizers import GROUP, MASTER_GROUP
from holdfast.tensors.fragments import Fragment, FragmentList, Storable, global_shape, local_tensors
from holdfast.tensors.leaves import Key, LackingCopy, OfferedLeaves, PartPlan, Selection
from holdfast.tensors.torch_dtypes import local_shape, torch_dtype
from holdfast_formats.region import Shape


def plan(state: ShardedOptimizer, stored: OfferedLeaves, selection: Selection, keeper: ContainerKeeper) -> PartPlan:
    """Want the live tensors, and new ones for what is stored and not live; `install` is called once all are filled."""
    made = PartPlan()
    if selection.takes(GROUP, state.key):
        made.documents.append((GROUP, state.key))
    text = stored.value(GROUP, state.key)
    if text is None or not selection.takes(GROUP, state.key):
        state.want_live(made, selection, set())
        return made
    return _Resumption(state, stored, selection, made, keeper).prepare(text)


class _Resumption:
    """Builds a plan from what an optimizer says of itself and a checkpoint's document of it."""

    def __init__(
        self, state: ShardedOptimizer, stored: OfferedLeaves, selection: Selection, plan: PartPlan, keeper: ContainerKeeper
    ) -> None:
        self.state = state
        self.stored = stored
        self.selection = selection
        self.plan = plan
        self.keeper = keeper
        self.done: set[Key] = set()
        self.values: dict[str, dict[str, Any]] = {}  # for `install`
        self.numbers: list[tuple[str, str, torch.Tensor]] = []  # stored as tensors, and plain numbers in the live state
        self.tensors: list[tuple[torch.Tensor, Any]] = []  # live tensors, and the plain numbers that are stored for them

    def prepare(self, text: str) -> PartPlan:
        document = read_document(text, self.state.key, self.stored, self.plan)
        if document is None:
            return self.plan
        for name in self.stored.specs.get(GROUP, {}):
            owner, _, key = name.rpartition("/")
            if owner in self.state.kept and (GROUP, name) not in self.plan.claimed and self.selection.takes(GROUP, name):
                self._claim(owner, key, (GROUP, name))
        self._masters(document["masters"])
        self._values(document["state"])
        self.state.want_live(self.plan, self.selection, self.done)
        groups = list(self.state.groups_of_parameters())
        names = [group["params"] for group in groups]
        given = given_to(self.state.shards.hooks) - {"lr"}  # the framework's own schedule moves it
        live = LiveGroups(self.state.key, names, groups, given)
        hyper = chosen(live, document, self.plan, self.selection)
        self.plan.actions.append(lambda: self._install(hyper))
        return self.plan

    def _masters(self, masters: Mapping[str, list[str]]) -> None:
        """Claim the full-precision copies, whatever key the saving optimizer had for them."""
        for key, names in masters.items():
            for name in names:
                if name not in self.state.kept:
                    continue
                own = (k for n, k, v in self.state.entries_of(name) if self.state.is_master(n, k, v))
                live = next(own, None)
                if self.stored.spec(MASTER_GROUP, name) is not None and self.selection.takes(MASTER_GROUP, name):
                    self._claim(name, live or key, (MASTER_GROUP, name))
                elif live is None:
                    self._lack(name, key)

    def _lack(self, name: str, key: str) -> None:
        """The saved optimizer had a copy of this parameter. One without state needs one to continue; one with state but
        without a copy keeps none.
        """
        weight, dtype = self.state.weights[name], stored_dtype(self.stored, name)
        if self.state.kept[name] or dtype.itemsize <= weight.dtype.itemsize:
            text = f"{self.state.key}: {name} is restored without its {key}, because group master is not restored"
            self.plan.notes.append(LeftOutNote(text))
            return
        made = self._fresh(name, key, dtype, global_shape(weight))
        self.values.setdefault(name, {})[key] = made.given if isinstance(made, FragmentList) else made
        self.plan.lacking.append(LackingCopy(name, weight, made))

    def _claim(self, name: str, key: str, target: Key) -> None:
        """Fill the live tensor under this key, or a new one made from the stored spec."""
        self.done.add(target)
        spec = self.stored.spec(*target)
        assert spec is not None
        live = self.state.kept[name].get(key)
        if is_storable(live):
            self.plan.want(*target, live)
            return
        dtype = torch_dtype(spec[0], target[1])
        shape = local_shape(dtype, spec[1])
        if isinstance(live, bool | int | float) and not shape:
            number = torch.zeros((), dtype=dtype)
            self.numbers.append((name, key, number))
            self.plan.want(*target, number)
            return
        made = self._fresh(name, key, dtype, shape)
        self.plan.want(*target, made)
        self.values.setdefault(name, {})[key] = made.given if isinstance(made, FragmentList) else made

    def _fresh(self, name: str, key: str, dtype: torch.dtype, shape: Shape) -> Storable:
        """A new tensor: from the optimizer; or with the place of the parameter's full-precision copy, else of the parameter;
        a whole one for another shape.
        """
        known = [v for n, k, v in self.state.entries_of(name) if self.state.is_master(n, k, v)]
        like = (known or [self.state.weights[name]])[0]
        if self.state.shards.new is not None and shape == global_shape(like) and (shape or key != "step"):
            path = f"{self.state.key}.new({name!r}, {key!r})"
            return checked(self.state.shards.new(name, key, dtype), path)
        if not shape:
            return torch.zeros((), dtype=dtype)
        if shape != global_shape(like):
            device = next((local.device for local in local_tensors(like)), torch.device("cpu"))
            return torch.empty(shape, dtype=dtype, device=device)
        if isinstance(like, FragmentList):
            return like.with_new_memory(dtype)
        if isinstance(like, Fragment):
            return like.with_tensor(torch.empty_like(like.tensor.detach(), dtype=dtype))
        return torch.empty_like(like.detach(), dtype=dtype)

    def _values(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the stored JSON values, and live ones that the checkpoint lacks."""
        for name, kept in self.state.kept.items():
            offered = stored.get(name, {})
            for key, value in kept.items():
                number = offered.get(key)
                if isinstance(value, torch.Tensor) and not value.dim() and isinstance(number, int | float):
                    self.tensors.append((value, number))
                    self.done.add(self.state.target(name, key, value))
                elif not is_storable(value) and key not in offered and (GROUP, f"{name}/{key}") not in self.done:
                    self.plan.missing.append(f"{GROUP}/{name}/{key}")
        taken = {id(tensor) for tensor, _ in self.tensors}
        for name, offered in stored.items():
            for key, value in offered.items() if name in self.state.kept else ():
                live = self.state.kept[name].get(key)
                if id(live) not in taken:
                    self.values.setdefault(name, {})[key] = value

    def _install(self, hyper: list[dict[str, Any]]) -> None:
        for name, key, number in self.numbers:
            live = self.state.kept[name][key]
            self.values.setdefault(name, {})[key] = type(live)(number.item())
        with torch.no_grad():
            for tensor, value in self.tensors:
                tensor.fill_(value)
        for name, kept in self.values.items():
            for key, value in kept.items():
                live = self.state.kept[name].get(key)
                if not is_storable(live):
                    kept[key] = self.keeper.put(live, value, f"{self.state.key}/{name}/{key}")
        groups = []
        for position, (live, stored) in enumerate(zip(self.state.groups_of_parameters(), hyper, strict=True)):
            where = f"{self.state.key}/groups[{position}]"
            groups.append(
                {
                    key: self.keeper.put(live.get(key), merged(live.get(key), value), f"{where}/{key}")
                    for key, value in stored.items()
                }
            )
        self.state.shards.install(groups, self.values)

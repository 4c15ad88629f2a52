"""An optimizer by parameter name, for frameworks that keep its state in partitions of their own.

It is stored as `state_tensors` describes, so that a torch optimizer over whole parameters or DTensors, and any
other partition, can read it, and vice versa.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from holdfast.state import masters
from holdfast.state.hyper_parameters import given_to
from holdfast.state.state_tensors import (
    GROUP,
    MASTER_GROUP,
    MASTER_KEYS,
    NewTensor,
    OptimizerDocument,
    StateTensor,
    collect_state,
    device_of,
    is_storable,
    kind_of,
)
from holdfast.tensors.fragments import (
    Fragment,
    FragmentList,
    Storable,
    fragment_list,
    global_shape,
    holds_fragments,
    same_memory,
)
from holdfast.tensors.leaves import Content
from holdfast.tensors.torch_dtypes import local_shape
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import Shape

Group = Mapping[str, Any]
Kept = Mapping[str, Any]  # what an optimizer keeps of a parameter, by key

_WHOLE = (torch.Tensor, Fragment)
_PLAIN = (bool, int, float, str, type(None))  # immutable values, compared by their `repr`


class OptimizerShards:
    """An entry of the state: an optimizer by parameter name, with this rank's part of each.

    Names are those under which the state's modules store the parameters. A parameter of which this rank keeps no part has
    empty Fragments there; one that it lacks has no state yet. `step` is a tensor without dimensions, as in torch's
    optimizers. Full-precision copies have a key such as "master": they are stored in the group `master`. The tensors are
    those that the framework keeps, or views of them: a restore writes into them. All of it is read again at every save.

    Args:
        groups: Returns the parameter groups, in order: dicts with the names under "params", and the hyper-parameters.
        state: Returns, by name and then by key, tensors, Fragments, lists of Fragments, or JSON values such as numbers.
            Returning the identical Fragments while they are valid makes saves faster.
        install: Called as `install(groups, values)` after a restore has filled the tensors in place. `groups` has the
            restored hyper-parameters of every group of `groups()`, in order, empty for a group that was not saved;
            `values`, by name and key, the JSON values, and new tensors or Fragments for saved state that `state()` lacks.
            These have the place of the parameter's full-precision copy, else of the parameter itself, or are what `new`
            returns.
        hooks: The torch optimizers whose steps change this state: they wait until the last save has copied it. Without any,
            `save()` copies everything before it returns.
        new: `new(name, key, dtype)` returns what `values` has for a key whose tensor has the parameter's shape, such as a
            part of a new flat buffer, or an empty Fragment for what other ranks keep.
        makes_masters: Whether `new` also makes full-precision copies, with the key "master", of a checkpoint whose optimizer
            does not list them, such as an imported one.
        unchanged: Returns whether `state()` would return the identical objects as last time, of the same memory and form,
            and equal other values. Without it, each save compares all of them.
        check: Called as `check(groups, keys)` before a restore changes anything: with the hyper-parameters that `install`
            will get, less tensors, and the keys of `values` by name. It raises what `install` would refuse.
        left_out: Returns what a save leaves out now, in sentences; a warning has each.

    Raises:
        InvalidRequest: For arguments that are not functions, and for hooks that are not torch optimizers.

    Example:
        >>> shards = OptimizerShards(groups=engine.groups, state=engine.state, install=engine.install)
        >>> state = {"model": model, "optim": shards}
    """

    def __init__(  # noqa: PLR0913 - all named, most optional
        self,
        *,
        groups: Callable[[], Sequence[Group]],
        state: Callable[[], Mapping[str, Kept]],
        install: Callable[[list[dict[str, Any]], dict[str, dict[str, Any]]], None],
        hooks: Iterable[torch.optim.Optimizer] = (),
        new: Callable[[str, str, torch.dtype], Any] | None = None,
        makes_masters: bool = False,
        unchanged: Callable[[], bool] | None = None,
        check: Callable[[list[dict[str, Any]], dict[str, set[str]]], None] | None = None,
        left_out: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        functions = {"groups": groups, "state": state, "install": install, "left_out": left_out}
        optional = {"new": new, "unchanged": unchanged, "check": check}
        for name, function in {**functions, **optional}.items():
            if not callable(function) and (function is not None or name in functions):
                raise InvalidRequest(
                    f"{name}= of OptimizerShards must be a function, not a {type(function).__name__}",
                    hint="pass a function, as the example of OptimizerShards does",
                )
        self.groups, self.state, self.install = groups, state, install
        self.new, self.unchanged, self.check = new, unchanged, check
        self.makes_masters, self.left_out = makes_masters and new is not None, left_out
        # Name and key of the tensors that `state()` was seen to return twice.
        self.kept_for_good: set[tuple[str, str]] = set()
        self.hooks = (hooks,) if isinstance(hooks, torch.optim.Optimizer) else tuple(hooks)
        for hook in self.hooks:
            if not isinstance(hook, torch.optim.Optimizer):
                raise InvalidRequest(
                    f"hooks= of OptimizerShards must be torch optimizers, not a {type(hook).__name__}",
                    hint="pass the torch.optim.Optimizer that takes the steps",
                )


class ShardedOptimizer(NamedTuple):
    """The checked state of an `OptimizerShards` under one key. `weights` are the parameters by name."""

    key: str
    shards: OptimizerShards
    said: list[Group]
    kept: dict[str, dict[str, Any]]  # of every parameter, in the order of the groups
    given: Mapping[str, Kept]  # what the user's function returned
    weights: Mapping[str, Storable]

    @property
    def groups(self) -> frozenset[str]:
        return frozenset({GROUP, MASTER_GROUP})

    def parameter_names(self) -> Iterable[str]:
        return self.kept

    def groups_of_parameters(self) -> Sequence[Group]:
        """The current groups: hyper-parameters may change from save to save."""
        return _groups(self.key, self.shards)

    def names_of_groups(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        return [group["params"] for group in self.groups_of_parameters()]

    def user_given(self) -> frozenset[str]:
        """The hyper-parameters that its user gives; the framework's own schedule moves the learning rates. A hook that
        stands for the optimizer of another framework says what is given to that, and that no schedule moves.
        """
        told = (getattr(hook, "given", ()) for hook in self.shards.hooks)
        return (given_to(self.shards.hooks) - {"lr"}).union(*told)

    def began(self) -> dict[str, float]:
        """The framework's own scheduler sets the learning rates."""
        return {}

    def unchanged(self) -> bool:
        """Whether it would return the same now: the identical tensors and Fragments, equal values, for the same names."""
        groups = self.groups_of_parameters()
        if [group["params"] for group in groups] != [group["params"] for group in self.said]:
            return False
        if self.shards.unchanged is not None:
            return self.shards.unchanged()
        now = self.shards.state()
        return now.keys() == self.given.keys() and all(
            now[name].keys() == before.keys()
            and all([_same(now[name][key], value) for key, value in before.items()])  # a list: generators take twice as long
            for name, before in self.given.items()
        )

    def parameters(self) -> Iterator[ShardParameter]:
        return (ShardParameter(self.key, name, self.weights[name], kept, self.shards) for name, kept in self.kept.items())

    def entries(self) -> Iterator[StateTensor]:
        """Every tensor that is kept of a parameter."""
        for name, kept in self.kept.items():
            weight = self.weights[name]
            for key, value in kept.items():
                if is_storable(value):
                    master = _is_master(weight, key, value)
                    target = (MASTER_GROUP, name) if master else (GROUP, f"{name}/{key}")
                    yield StateTensor(name, key, target, value, None, kind_of(weight, value))

    def tensors(self) -> Iterator[Storable]:
        return (entry.value for entry in self.entries())

    def wrappers(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        """None: this interface has plain tensors only."""
        return ()

    def has_masters(self) -> bool:
        return any(entry.target[0] == MASTER_GROUP for entry in self.entries())

    def masters(self) -> Iterator[tuple[str, Storable, Storable]]:
        entries = list(self.entries())
        odd: set[str] = set()  # keys under which copies are, without being called so
        for name, key, target, value, *_ in entries:
            if key not in odd and target[0] != MASTER_GROUP:
                odd |= {key} if masters.is_kept_by_fragments(name, self.weights[name], value) else set()
        for name, key, target, value, *_ in entries:
            if target[0] == MASTER_GROUP or (key in odd and masters.is_wider(value, self.weights[name])):
                yield name, self.weights[name], value

    def collect(self, content: Content) -> None:
        """Add every tensor under its parameter's name, and the document with everything that is not a tensor."""
        self.collect_tensors(content).collect(content)

    def collect_tensors(self, content: Content) -> OptimizerDocument:
        """Add every tensor. Return the part of the document about them, which is valid until there are others."""
        return OptimizerDocument(self, collect_state(content, self.kept, self.entries(), ()))

    def check(self, groups: list[dict[str, Any]], keys: dict[str, set[str]]) -> None:
        if self.shards.check is not None:
            known = [{key: one for key, one in group.items() if not isinstance(one, torch.Tensor)} for group in groups]
            self.shards.check(known, keys)  # tensors are not filled yet

    def install(self, groups: list[dict[str, Any]], values: dict[str, dict[str, Any]]) -> None:
        self.shards.install(groups, values)


class ShardParameter(NamedTuple):
    """A parameter of an `OptimizerShards`."""

    optimizer: str
    name: str
    weight: Storable
    kept: Kept
    shards: OptimizerShards

    @property
    def value(self) -> Storable:
        return self.weight

    @property
    def is_elsewhere(self) -> bool:
        """Never: one that this rank has no part of has empty Fragments."""
        return False

    @property
    def state_dtype(self) -> torch.dtype | None:
        return None

    def fresh(self, key: str, dtype: torch.dtype, whole: Shape, kind: str) -> NewTensor:
        """A new tensor: from the optimizer; or with the place of the parameter's full-precision copy, else of the parameter;
        a whole one for another shape.
        """
        made = self._fresh(key, dtype, local_shape(dtype, whole))
        return NewTensor(made.given if isinstance(made, FragmentList) else made, made)

    def _fresh(self, key: str, dtype: torch.dtype, shape: Shape) -> Storable:
        known = [v for k, v in self.kept.items() if is_storable(v) and _is_master(self.weight, k, v)]
        like = (known or [self.weight])[0]
        if self.shards.new is not None and shape == global_shape(like) and (shape or key != "step"):
            return checked(self.shards.new(self.name, key, dtype), f"{self.optimizer}.new({self.name!r}, {key!r})")
        if not shape:
            return torch.zeros((), dtype=dtype)
        if shape != global_shape(like):
            return torch.empty(shape, dtype=dtype, device=device_of(like))
        if isinstance(like, FragmentList):
            return like.with_new_memory(dtype)
        if isinstance(like, Fragment):
            return like.with_tensor(torch.empty_like(like.tensor.detach(), dtype=dtype))
        return torch.empty_like(like.detach(), dtype=dtype)


def read(key: str, shards: OptimizerShards, weights: Mapping[str, Storable]) -> ShardedOptimizer:
    """Read an optimizer's present state.

    Raises `InvalidRequest` for a parameter that belongs to no module of the state or has two groups, for state outside of
    all groups, and for tensors made only for this call.
    """
    groups = _groups(key, shards)
    kept: dict[str, dict[str, Any]] = {}
    for position, group in enumerate(groups):
        for name in group["params"]:
            if name not in weights:
                raise InvalidRequest(
                    f"{key}.groups()[{position}] names {name!r}, which is not a parameter of a module in the state",
                    hint="use the names under which the state stores the parameters: the first one of tied parameters, and "
                    "with the key in front for a module under another key than model",
                )
            if name in kept:
                raise InvalidRequest(f"{key}.groups() names the parameter {name!r} twice", hint="name it in one group")
            kept[name] = {}
    given = shards.state()
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"{key}.state() must return a mapping of names, not a {type(given).__name__}",
            hint="return {NAME: {KEY: tensor}}, with the names of groups()",
        )
    for name, values in given.items():
        if name not in kept:
            raise InvalidRequest(
                f"{key}.state() has {name!r}, which is in none of the groups() and would not be saved",
                hint="name it in a group, or leave it out",
            )
        kept[name] = _checked(key, name, values)
    _refuse_temporaries(key, shards, kept)
    return ShardedOptimizer(key, shards, groups, kept, {name: dict(values) for name, values in given.items()}, weights)


def _refuse_temporaries(key: str, shards: OptimizerShards, kept: Mapping[str, Kept]) -> None:
    """Refuse new tensors at each call: a restore into those of the first call would be lost."""
    new = {(name, part) for name in kept for part, value in kept[name].items() if is_storable(value)} - shards.kept_for_good
    again = shards.state() if new else {}
    for name, part in sorted(new):
        value = again.get(name, {}).get(part)
        value = fragment_list(value, name) or value
        if not is_storable(value) or not same_memory(kept[name][part], value):
            raise InvalidRequest(
                f"{key}.state()[{name!r}][{part!r}] is different memory at every call, so a restore into it would be lost",
                hint="return the tensors that the optimizer keeps, or views of them: no copies, casts or concatenations",
            )
    shards.kept_for_good |= new


def checked(value: Any, path: str) -> Storable:
    """A tensor, Fragment or list of Fragments; `InvalidRequest` with the path for anything else."""
    checked_value = fragment_list(value, path) or value
    if not is_storable(checked_value):
        raise InvalidRequest(
            f"{path} must be a tensor, a Fragment or a list of Fragments, not a {type(value).__name__}",
            hint="return the tensor that the optimizer keeps, or its parts: Fragment(tensor, shape, offset=…)",
        )
    return checked_value


def _groups(key: str, shards: OptimizerShards) -> list[Group]:
    groups = list(shards.groups())
    for position, group in enumerate(groups):
        names = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) and name for name in names):
            raise InvalidRequest(
                f"{key}.groups()[{position}] must be a dict with the names of its parameters under 'params', as a list",
                hint="for example {'params': ['layer.weight'], 'lr': 0.1}",
            )
    return [{**group, "params": list(group["params"])} for group in groups]


def _checked(optimizer: str, name: str, values: object) -> dict[str, Any]:
    path = f"{optimizer}.state()[{name!r}]"
    if not isinstance(values, Mapping):
        raise InvalidRequest(
            f"{path} must be a mapping of keys to values, not a {type(values).__name__}",
            hint="return {NAME: {KEY: tensor}}, with the names of groups()",
        )
    checked_values: dict[str, Any] = {}
    for key, value in values.items():
        if not isinstance(key, str) or not key or "/" in key:
            raise InvalidRequest(
                f"{path} has the key {key!r}, which is not a valid name", hint="use text that is not empty and has no '/'"
            )
        if type(value) in (list, tuple) and not value:
            raise InvalidRequest(
                f"{path}[{key!r}]: an empty list does not say which tensor this rank has no part of",
                hint="if it has none, list an empty Fragment: Fragment(torch.empty(0, dtype=…), shape, flat=(0, 0))",
            )
        checked_values[key] = fragment_list(value, f"{path}[{key!r}]") or value
    return checked_values


def _is_master(weight: Storable, key: str, value: Storable) -> bool:
    return key in MASTER_KEYS and global_shape(value) == global_shape(weight)


def _same(now: Any, before: Any) -> bool:
    if isinstance(before, _WHOLE):
        return now is before
    if holds_fragments(before):
        return holds_fragments(now) and len(now) == len(before) and all(map(is_, now, before))
    return type(now) is type(before) and isinstance(before, _PLAIN) and repr(now) == repr(before)

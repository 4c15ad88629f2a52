"""Megatron's optimizers by the names of the stored tensors: full-precision copies, moments, steps and hyper-parameters.

A `DistributedOptimizer` steps a flat range of each local parameter, or none of it; the others step it whole. In both cases
the range is cut along the pieces of the parameter (`pieces`), so any parallel layout reads what any other has saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.integrations.megatron.pieces import Stored, empty, place
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Shape

MASTER, STEP = "master_param", "step"

Named = dict[str, list[Fragment]]
_NOTHING: dict[str, Any] = {}


class Trained(NamedTuple):
    """A parameter as an optimizer of this rank steps it.

    `stepped` is the tensor in the torch optimizer's groups: the local elements of the parameter from `begin` on.
    `copied`: it is a full-precision copy.
    """

    weight: Stored
    optimizer: torch.optim.Optimizer
    group: int
    stepped: torch.Tensor
    begin: int
    copied: bool

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(piece.name for piece in self.weight.pieces))

    def cut(self, tensor: torch.Tensor) -> Named:
        """The part of each stored tensor in a tensor of `stepped`'s shape."""
        flat = tensor.detach().view(-1)
        named: Named = {}
        for piece in self.weight.pieces:
            named.setdefault(piece.name, []).append(piece.within(flat, self.begin))
        return {name: [part for part in parts if part.tensor.numel()] or parts[:1] for name, parts in named.items()}


class MegatronOptimizerByName:
    """The interface `OptimizerShards` for a Megatron optimizer.

    `others` are stored tensors that no optimizer of this rank steps, by name, which a restore needs to compare names.
    """

    def __init__(self, optimizer: Any, tensors: Sequence[Stored]) -> None:
        """Raises `InvalidRequest` for unknown optimizers."""
        self._inner = [one for one in members(optimizer) if not getattr(one, "is_stub_optimizer", False)]
        self._known = {place(stored.tensor): stored for stored in tensors}
        self.trained = [one for member in self._inner for one in _trained(member, self._known)]
        self.others: dict[str, Shape] = {}
        self._by_name = {name: one for one in self.trained for name in one.names}
        self._cut: dict[tuple[int, str], tuple[torch.Tensor, Named]] = {}
        self._steps: dict[str, torch.Tensor] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of `_steps`, and what each is a copy of
        self._kept: list[tuple[tuple[str, Any], ...]] = []  # what the optimizers kept when `_said` was made
        self._said: dict[str, dict[str, Any]] = {}
        self._made: dict[tuple[int, str], tuple[Trained, torch.Tensor]] = {}

    @property
    def hooks(self) -> list[torch.optim.Optimizer]:
        return [member.optimizer for member in self._inner]

    def shards(self) -> OptimizerShards:
        return OptimizerShards(
            groups=self.groups, state=self.state, install=self.install, hooks=self.hooks, new=self.new_tensor
        )

    def groups(self) -> list[dict[str, Any]]:
        """Every group of every optimizer with its hyper-parameters, and the parameters of others, if any."""
        names: dict[tuple[int, int], list[str]] = {}
        for one in self.trained:
            names.setdefault((id(one.optimizer), one.group), []).extend(one.names)
        found = [
            {**group, "params": names.get((id(inner), number), [])}
            for inner in self.hooks
            for number, group in enumerate(inner.param_groups)
        ]
        return [*found, {"params": list(self.others)}] if self.others else found

    def state(self) -> dict[str, dict[str, Any]]:
        """The full-precision copy of each parameter, and the torch optimizer's state of it.

        Called several times a save: cached while the optimizer keeps the identical objects.
        """
        kept = [one.optimizer.state.get(one.stepped, _NOTHING) for one in self.trained]
        if len(kept) != len(self._kept) or not all(map(_same, kept, self._kept)):
            self._said = self._read(kept)
            self._kept = [tuple(values.items()) for values in kept]
        for copy, value in self._copies:
            copy.copy_(value)
        return self._said

    def _read(self, kept: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        by_name: dict[str, dict[str, Any]] = {}
        self._copies.clear()
        for one, values in zip(self.trained, kept, strict=True):
            if one.copied:
                self._add(by_name, one, MASTER, one.stepped)
            for key, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim() and key != STEP:
                    self._add(by_name, one, key, value)
                elif isinstance(value, torch.Tensor):
                    self._add_number(by_name, one, key, value)
                else:
                    for name in one.names:
                        by_name.setdefault(name, {})[key] = value
        return by_name

    def new_tensor(self, name: str, key: str, dtype: torch.dtype) -> list[Fragment]:
        """Memory for state that a checkpoint has and this optimizer does not have yet."""
        one = self._by_name.get(name)
        if one is None:
            return [empty(self.others[name], dtype)]
        kept = self._made.get((id(one.stepped), key))
        if kept is None:
            kept = self._made[id(one.stepped), key] = one, torch.zeros_like(one.stepped.detach(), dtype=dtype)
        return one.cut(kept[1])[name]

    def install(self, groups: list[dict[str, Any]], values: dict[str, dict[str, Any]]) -> None:
        """Install restored values, except tensors that were filled in place."""
        own = [group for inner in self.hooks for group in inner.param_groups]
        for group, restored in zip(own, groups, strict=False):  # the last one may be that of the others
            group.update({key: value for key, value in restored.items() if key != "params"})
        for (_, key), (one, tensor) in self._made.items():
            one.optimizer.state[one.stepped][key] = tensor
        self._made.clear()
        for one in self.trained:
            self._install_numbers(one, values)

    def _add(self, by_name: dict[str, dict[str, Any]], one: Trained, key: str, tensor: torch.Tensor) -> None:
        if tensor.shape != one.stepped.shape or not tensor.is_contiguous():
            raise InvalidRequest(
                f"the optimizer's {key} of {one.weight.own} has shape {list(tensor.shape)}, but the tensor that it "
                f"updates has shape {list(one.stepped.shape)}, so Holdfast cannot match their elements",
                hint="use an optimizer whose state tensors have the parameter's shape, such as Adam or SGD",
            )
        before = self._cut.get((id(one.stepped), key))
        if before is None or before[0] is not tensor:
            before = self._cut[id(one.stepped), key] = tensor, one.cut(tensor)
        for name, parts in before[1].items():
            by_name.setdefault(name, {})[key] = parts

    def _add_number(self, by_name: dict[str, dict[str, Any]], one: Trained, key: str, value: torch.Tensor) -> None:
        """Add a number that the torch optimizer keeps as a tensor, with copies if several stored tensors have it."""
        names = one.names
        if len(names) == 1:
            by_name.setdefault(names[0], {})[key] = value
            return
        for name in names:
            copy = self._steps.setdefault(f"{name}/{key}", torch.empty_like(value, device="cpu"))
            self._copies.append((copy, value))
            by_name.setdefault(name, {})[key] = copy

    def _install_numbers(self, one: Trained, values: Mapping[str, Mapping[str, Any]]) -> None:
        kept = one.optimizer.state.get(one.stepped, {})
        numbers: dict[str, list[Any]] = {}
        for name in one.names:
            copies = {key: self._steps[f"{name}/{key}"] for key in kept if f"{name}/{key}" in self._steps}
            for key, value in {**copies, **values.get(name, {})}.items():
                if not isinstance(value, list | Fragment):
                    numbers.setdefault(key, []).append(value)
        for key, found in numbers.items():
            first = found[0]
            if any(bool(other != first) for other in found[1:]):
                raise StateMismatch(f"the parts of {one.weight.own} were saved with different values of {key}: {found}")
            live = kept.get(key)
            if isinstance(live, torch.Tensor):
                live.copy_(torch.as_tensor(first))
            else:
                one.optimizer.state[one.stepped][key] = first.clone() if isinstance(first, torch.Tensor) else first
        settle_step(one)


def members(optimizer: Any) -> Iterator[Any]:
    """The optimizers in a `ChainedOptimizer`, at any depth; the optimizer itself otherwise."""
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    if isinstance(optimizer, ChainedOptimizer):
        for one in optimizer.chained_optimizers:
            yield from members(one)
    else:
        yield optimizer


def settle_step(one: Trained) -> None:
    """torch's Adam counts steps for each parameter, and the fused ones of Apex and Transformer Engine for each group."""
    kept, group = one.optimizer.state.get(one.stepped), one.optimizer.param_groups[one.group]
    if not kept:
        return
    fused = type(one.optimizer).__name__.startswith("Fused")
    if not fused and STEP not in kept and STEP in group:
        kept[STEP] = torch.tensor(float(group[STEP]))
    elif fused and STEP in kept and STEP not in group:
        group[STEP] = int(kept.pop(STEP))


def _trained(member: Any, known: Mapping[Any, Stored]) -> Iterator[Trained]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    _refuse(member)
    if type(member) is DistributedOptimizer:
        optimizer = _distributed(member)
    elif type(member) is Float16OptimizerWithFloat16Params:
        optimizer = _mixed(member)
    elif type(member) is FP32Optimizer:
        optimizer = _plain(member)
    else:
        raise InvalidRequest(
            f"{type(member).__name__} is an optimizer that is not supported",
            hint="supported are DistributedOptimizer, Float16OptimizerWithFloat16Params and FP32Optimizer, also chained",
        )
    for number, parameter, stepped, begin, copied in optimizer:
        if stepped is None:
            raise InvalidRequest(f"{type(member).__name__} keeps part of a parameter (FP8) in an unknown place")
        stored = known.get(place(parameter))
        if stored is None:
            raise InvalidRequest(
                f"{type(member).__name__} steps a parameter of shape {list(parameter.shape)} that is not in the model",
                hint="pass the model that the optimizer was made for",
            )
        yield Trained(stored, member.optimizer, number, stepped, begin, copied)


def _same(kept: Mapping[str, Any], before: tuple[tuple[str, Any], ...]) -> bool:
    return len(kept) == len(before) and all(kept.get(key) is value for key, value in before)


_Found = tuple[int, torch.Tensor, torch.Tensor, int, bool]  # group, parameter, what is stepped, where it begins, a copy?


def _distributed(member: Any) -> Iterator[_Found]:
    """Groups of parameters and of their parts are parallel lists in 0.13 to 0.16.1; there is no public method."""
    kinds = (
        (member.model_fp32_groups, member.shard_fp32_groups, False),
        (member.model_float16_groups, member.shard_fp32_from_float16_groups, True),
    )
    for models, parts, copied in kinds:
        for number, (parameters, steps) in enumerate(zip(models, parts, strict=True)):
            for parameter, stepped in zip(parameters, steps, strict=True):
                buffer, dtype, bucket = member.model_param_gbuf_map[parameter]
                held = member.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
                if stepped is not None and stepped.numel() != held.end - held.start:
                    raise InvalidRequest(
                        f"DistributedOptimizer updates {stepped.numel()} elements of a parameter, but its range "
                        f"has {held.end - held.start}",
                        hint="use megatron-core 0.16.1; Holdfast is not tested with this version",
                    )
                yield number, parameter, stepped, held.start, copied


def _mixed(member: Any) -> Iterator[_Found]:
    kinds = (
        (member.float16_groups, member.fp32_from_float16_groups, True),
        (member.fp32_from_fp32_groups, member.fp32_from_fp32_groups, False),
    )
    for models, parts, copied in kinds:
        for number, (parameters, steps) in enumerate(zip(models, parts, strict=True)):
            for parameter, stepped in zip(parameters, steps, strict=True):
                yield number, parameter, stepped, 0, copied


def _plain(member: Any) -> Iterator[_Found]:
    for number, group in enumerate(member.optimizer.param_groups):
        for parameter in group["params"]:
            yield number, parameter, parameter, 0, False


def _refuse(member: Any) -> None:
    config = getattr(member, "config", None)
    for name, text in (
        ("use_precision_aware_optimizer", "keeps scaled copies and moments inside a fused optimizer"),
        ("optimizer_cpu_offload", "keeps a part of its state on the CPU, in its own optimizers"),
    ):
        if getattr(config, name, False):
            raise InvalidRequest(f"an optimizer with {name} is not supported: it {text}", hint=f"train without {name}")
    inner = getattr(member, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        raise InvalidRequest(
            f"{type(member).__name__} has no torch optimizer inside, but a {type(inner).__name__}",
            hint="pass the optimizer that get_megatron_optimizer() returns",
        )

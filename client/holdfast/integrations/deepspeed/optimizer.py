"""An engine's optimizer by parameter name, read from DeepSpeed's flat tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.integrations.deepspeed.partitions import MasterPart, Unit
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import InvalidRequest, StateMismatch

MASTER = "master"
STEP = "step"
# DeepSpeed's optimizers whose `step` is a plain number; torch's have a tensor.
_COUNTS = frozenset({"DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad", "FusedAdam", "FusedLion", "FusedLamb"})


class _FlatFragments:
    """Fragments of a flat tensor, one for each part of a unit, cached while its memory stays the same."""

    def __init__(self, unit: Unit, tensor: torch.Tensor) -> None:
        self._memory = tensor.data_ptr()
        line = tensor.detach().view(-1)
        self.fragments = {part.name: _fragment(part, line) for part in unit.parts}

    def are_of(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() == self._memory


def _fragment(part: MasterPart, line: torch.Tensor) -> Fragment:
    local = line.narrow(0, part.at, part.size) if part.size else torch.empty(0, dtype=line.dtype)
    return Fragment(local, part.shape, flat=(part.start, part.start + part.size))


class _UnitState:
    def __init__(self, unit: Unit, base: torch.optim.Optimizer) -> None:
        self.unit, self.base = unit, base
        self._views: dict[str, _FlatFragments] = {}
        # A number for each part, of values that the inner optimizer has once; and views of each of them.
        self._numbers: dict[str, torch.Tensor] = {}
        self._scalars: dict[str, dict[str, torch.Tensor]] = {}
        self._parts = {part.name: number for number, part in enumerate(unit.parts)}
        self._new: dict[str, torch.Tensor] = {}

    @property
    def kept(self) -> dict[str, Any]:
        held: dict[str, Any] = self.base.state.get(self.unit.flat, {})
        return held

    def by_name(self) -> dict[str, dict[str, Any]]:
        """Its state by parameter; `InvalidRequest` for state without one element per parameter element."""
        found: dict[str, dict[str, Any]] = {part.name: {} for part in self.unit.parts}
        if self.unit.keeps_masters:
            self._add(found, MASTER, self._viewed(MASTER, self.unit.flat))
        for key, value in self.kept.items():
            if isinstance(value, torch.Tensor) and value.shape == self.unit.flat.shape:
                self._add(found, key, self._viewed(key, value))
            elif (isinstance(value, torch.Tensor) and value.numel() == 1) or (key == STEP and type(value) in (int, float)):
                self._add(found, key, self._number(key, value))
            elif isinstance(value, torch.Tensor):
                raise InvalidRequest(
                    f"{type(self.base).__name__} keeps {key!r} of shape {list(value.shape)} for a flat tensor of "
                    f"{self.unit.flat.numel()} elements, and Holdfast cannot assign its values to parameters",
                    hint="use an optimizer that keeps one value for each element, or save with DeepSpeed itself",
                )
            else:
                self._add(found, key, dict.fromkeys(found, value))
        return {name: values for name, values in found.items() if values}

    def made(self, key: str, name: str, dtype: torch.dtype) -> Fragment:
        """This rank's part of a new zeroed flat tensor, installed later."""
        if key not in self._new:
            self._new[key] = torch.zeros_like(self.unit.flat.detach(), dtype=dtype)
        return self._viewed(key, self._new[key])[name]

    def install(self, values: Mapping[str, Mapping[str, Any]]) -> None:
        """Install restored values: new flat tensors, and numbers that must be equal in all parts."""
        names = list(self._parts)
        given = {key for name in names for key in values.get(name, {})}
        kept = self.base.state[self.unit.flat] if self._new or given or self.kept else {}
        before = dict(kept)
        kept.update(self._new)
        self._new = {}
        for key in sorted((given | set(self._numbers)) - set(self._views)):
            own = self._numbers.get(key)
            found = [
                values[name][key] if key in values.get(name, {}) else own[at] if own is not None else None
                for at, name in enumerate(names)
            ]
            if not found or found[0] is None:
                continue
            self._refuse_different(key, found)
            kept[key] = self._as_before(key, before.get(key), found[0])

    def _add(self, by_name: dict[str, dict[str, Any]], key: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            by_name[name][key] = value

    def _viewed(self, key: str, tensor: torch.Tensor) -> dict[str, Fragment]:
        views = self._views.get(key)
        if views is None or not views.are_of(tensor):
            views = self._views[key] = _FlatFragments(self.unit, tensor)
        return views.fragments

    def _number(self, key: str, value: Any) -> dict[str, torch.Tensor]:
        dtype = value.dtype if isinstance(value, torch.Tensor) else torch.float32
        if key not in self._numbers or self._numbers[key].dtype != dtype:
            self._numbers[key] = torch.empty(len(self._parts), dtype=dtype)
            self._scalars[key] = dict(zip(self._parts, self._numbers[key].unbind(), strict=True))
        self._numbers[key].fill_(float(value))
        return self._scalars[key]

    def _refuse_different(self, key: str, values: list[Any]) -> None:
        numbers = [value.item() if isinstance(value, torch.Tensor) else value for value in values]
        other = next((at for at, value in enumerate(numbers) if value != numbers[0]), None)
        if other is not None:
            names = list(self._parts)
            raise StateMismatch(
                f"DeepSpeed keeps one {key!r} for all parameters of a flat tensor, and the checkpoint has {numbers[0]} for "
                f"{names[0]} and {numbers[other]} for {names[other]}",
                hint="put these parameters into different param_groups, or restore without the optimizer's state",
            )

    def _as_before(self, key: str, before: Any, value: Any) -> Any:
        """The restored value in the type that the optimizer has, or would have made itself."""
        number = value.item() if isinstance(value, torch.Tensor) else value
        if isinstance(before, torch.Tensor):
            with torch.no_grad():
                return before.fill_(number)
        if before is not None:
            return type(before)(number) if isinstance(before, int | float) else value
        if key != STEP or not isinstance(value, torch.Tensor):
            return value
        if type(self.base).__name__ in _COUNTS and type(self.base).__module__.startswith("deepspeed."):
            return int(number)
        if not any(parent.__module__.startswith("torch.optim.") for parent in type(self.base).__mro__[:-1]):
            raise StateMismatch(f"{type(self.base).__name__} has not stepped yet, so Holdfast cannot find its step counter")
        on_device = any(self.base.defaults.get(name) for name in ("capturable", "fused"))
        return value.detach().clone().to(self.unit.flat.device if on_device else "cpu")


class PartitionedOptimizer:
    """The inner optimizer of an engine, as an entry of a state."""

    def __init__(self, units: list[Unit], base: torch.optim.Optimizer) -> None:
        self.units, self.base = units, base
        self._groups = list(base.param_groups)
        self._states = [_UnitState(unit, base) for unit in units]
        self._owner = {part.name: state for state in self._states for part in state.unit.parts}
        self.entry = OptimizerShards(groups=self.groups, state=self.state, install=self.install, hooks=[base], new=self.new)

    def groups(self) -> list[dict[str, Any]]:
        found = [{**group, "params": []} for group in self._param_groups()]
        for unit in self.units:
            found[unit.group]["params"] += [part.name for part in unit.parts]
        return found

    def state(self) -> dict[str, dict[str, Any]]:
        self._refuse_strangers()
        return {name: values for state in self._states for name, values in state.by_name().items()}

    def new(self, name: str, key: str, dtype: torch.dtype) -> Fragment:
        return self._owner[name].made(key, name, dtype)

    def install(self, groups: list[dict[str, Any]], values: dict[str, dict[str, Any]]) -> None:
        for live, stored in zip(self._param_groups(), groups, strict=True):
            live.update(stored)
        for state in self._states:
            state.install(values)

    def follow_weights(self) -> None:
        """Recompute masters that are not stored, because they equal the weights."""
        with torch.no_grad():
            for unit in self.units:
                if not unit.keeps_masters:
                    line = unit.flat.detach().view(-1)
                    for part in unit.parts:
                        line.narrow(0, part.at, part.size).copy_(part.weight)

    def _param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups; during a step ZeRO-1 and 2 leave it only the current one."""
        if len(self.base.param_groups) >= len(self._groups):
            self._groups = list(self.base.param_groups)
        return self._groups

    def _refuse_strangers(self) -> None:
        """Refuse state that belongs to no flat tensor: it would be lost."""
        known = {id(unit.flat) for unit in self.units}
        for tensor, kept in self.base.state.items():
            if kept and id(tensor) not in known:
                raise InvalidRequest(
                    f"{type(self.base).__name__} keeps {', '.join(map(str, kept))} for a key that is not a flat "
                    "tensor of the engine, so this state would not be saved"
                )

"""DeepSpeed's masters: flat tensors, and which parts of which parameters each contains.

All names are those of DeepSpeed 0.19.8. None of this is public there, so everything is checked before use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from holdfast.integrations.deepspeed.refusals import STAGE_3
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import Shape


class MasterPart(NamedTuple):
    """A parameter's part of a flat tensor: elements [start, start + size) of the flattened parameter, at `at` in the
    flat one. `size` is 0 if another rank has them. `weight` are the same elements of the live weight.
    """

    name: str
    shape: Shape
    start: int
    size: int
    at: int
    weight: torch.Tensor


class Unit(NamedTuple):
    """A flat tensor of masters as the inner optimizer holds it, in its parameter group number `group`."""

    group: int
    flat: torch.Tensor
    parts: tuple[MasterPart, ...]

    @property
    def keeps_masters(self) -> bool:
        """Whether masters and weights differ in dtype; otherwise a step makes them equal."""
        return any(part.weight.dtype != self.flat.dtype for part in self.parts)


def units(optimizer: Any, names: Mapping[int, str]) -> list[Unit]:
    """The flat tensors of an engine's optimizer, in the same order on every rank.

    `names` are the stored names of the parameters by identity. Raises `InvalidRequest` if DeepSpeed's own figures
    contradict one another.
    """
    kind = type(optimizer).__name__
    by_unit = {
        "DeepSpeedZeroOptimizer": _stages_1_and_2,
        STAGE_3: _stage_3,
        "BF16_Optimizer": _bf16,
        "FP16_Optimizer": _fp16,
        "FP16_UnfusedOptimizer": _fp16_unfused,
    }[kind](optimizer, names)
    made = list(by_unit)
    for unit in made:
        _check(kind, unit)
    return made


def whole_shape(parameter: torch.Tensor) -> Shape:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def stage_3_part(parameter: Any) -> tuple[int, int, torch.Tensor]:
    """Start and count of this rank's elements of a ZeRO-3 parameter, and the elements, without padding."""
    held = parameter.ds_tensor.data
    per_rank = held.numel()
    start = min(_stage_3_rank(parameter) * per_rank, parameter.ds_numel)
    count = min(per_rank, parameter.ds_numel - start)
    return start, count, held.view(-1).narrow(0, 0, count)


def _stage_3_rank(parameter: Any) -> int:
    from deepspeed import comm

    rank: int = comm.get_rank(group=parameter.ds_process_group)
    return rank


def _stage_3(optimizer: Any, names: Mapping[int, str]) -> Iterator[Unit]:
    for number, (group, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True)):
        parts = []
        for parameter in group:
            sub_group, at, length = optimizer.grad_position[parameter.ds_id]
            start, count, weight = stage_3_part(parameter)
            if sub_group != number or length != parameter.ds_tensor.numel():
                raise _strange(STAGE_3, names[id(parameter)], "has its gradient and master in different places")
            parts.append(MasterPart(names[id(parameter)], whole_shape(parameter), start, count, at, weight))
        yield Unit(optimizer.sub_group_to_group_id[number], flat, tuple(parts))


def _stages_1_and_2(optimizer: Any, names: Mapping[int, str]) -> Iterator[Unit]:
    return _mapped(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, names)


def _bf16(optimizer: Any, names: Mapping[int, str]) -> Iterator[Unit]:
    return _mapped(optimizer.bf16_groups, optimizer.fp32_groups_flat_partition, names)


def _mapped(groups: Sequence[Sequence[Any]], flats: Sequence[torch.Tensor], names: Mapping[int, str]) -> Iterator[Unit]:
    """Units of optimizers that record each parameter's masters, or None where they are on other ranks."""
    for number, (group, flat) in enumerate(zip(groups, flats, strict=True)):
        parts = []
        for parameter in group:
            mapping = parameter._hp_mapping
            line = parameter.data.view(-1)
            if mapping is None:
                parts.append(MasterPart(names[id(parameter)], tuple(parameter.shape), 0, 0, 0, line[:0]))
                continue
            low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
            if low.numel != high.numel or mapping.hp_fragment.data_ptr() != flat[high.start :].data_ptr():
                raise _strange("ZeRO", names[id(parameter)], "has its master outside the optimizer")
            weight = line.narrow(0, low.start, low.numel)
            parts.append(MasterPart(names[id(parameter)], tuple(parameter.shape), low.start, low.numel, high.start, weight))
        yield Unit(number, flat, tuple(parts))


def _fp16(optimizer: Any, names: Mapping[int, str]) -> Iterator[Unit]:
    for number, (group, flat) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True)):
        parts, at = [], 0
        for parameter in group:
            line = parameter.data.view(-1)
            parts.append(MasterPart(names[id(parameter)], tuple(parameter.shape), 0, len(line), at, line))
            at += len(line)
        yield Unit(number, flat, tuple(parts))


def _fp16_unfused(optimizer: Any, names: Mapping[int, str]) -> Iterator[Unit]:
    for number, (group, masters) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)):
        for parameter, master in zip(group, masters, strict=True):
            line = parameter.data.view(-1)
            yield Unit(number, master, (MasterPart(names[id(parameter)], tuple(parameter.shape), 0, len(line), 0, line),))


def _check(kind: str, unit: Unit) -> None:
    end = 0
    for part in sorted(unit.parts, key=lambda part: part.at):
        if not part.size:
            continue
        if part.at < end or part.at + part.size > unit.flat.numel() or len(part.weight) != part.size:
            raise _strange(kind, part.name, "does not lie in its flat tensor")
        end = part.at + part.size


def _strange(kind: str, name: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{kind}: the parameter {name!r} {what}, which Holdfast does not expect",
        hint="Holdfast is tested with DeepSpeed 0.19.8; save with DeepSpeed itself, and report your version of DeepSpeed",
    )

"""The optimizer's part of a ZeRO checkpoint: each rank's partitions of masters and state, joined by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats import dtypes
from holdfast_formats.files import Files
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import ForeignTensor, TensorKey
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import torch_values
from holdfast_service.wings.convert.foreign.computed import scalar
from holdfast_service.wings.convert.foreign.deepspeed import files as zero_files
from holdfast_service.wings.convert.foreign.deepspeed import zero_partitions
from holdfast_service.wings.convert.foreign.deepspeed.files import dict_in, flat, list_in
from holdfast_service.wings.convert.foreign.deepspeed.zero_partitions import FlatParameter
from holdfast_service.wings.convert.foreign.pickles import PickledArray, PickledRecord
from holdfast_service.wings.convert.foreign.stored_arrays import StoredArray

STEP = "step"
_NO_HYPER = ("params", STEP, "param_names")
_KNOWN = {
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "clip_grad",
    "base_optimizer_state",
    "optimizer_state_dict",
    "single_partition_of_fp32_groups",
    "fp32_flat_groups",
    "zero_stage",
    "group_paddings",
    "param_alignment_paddings",
    "partition_count",
    "ds_version",
    "param_slice_mappings",
    "ds_config",
}


class ZeroRank(NamedTuple):
    """One rank's file: masters by group (sub-group in ZeRO 3), state by group, and hyper-parameters.

    `paddings` follow each parameter of each group in the flat tensor. `fragments` are first element and length of the rank's
    part of each parameter, in its partition of a group.
    """

    path: str
    stage: int
    partitions: tuple[int, ...]
    masters: tuple[StoredArray, ...]
    state: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...]
    paddings: Sequence[Sequence[int]] | None
    fragments: Sequence[Mapping[str, tuple[int, int]]] | None
    loss_scaler: PickledRecord | None


def rank_state(value: Mapping[str, Any], path: str) -> ZeroRank:
    """One rank's file; `StateMismatch` if it is not as DeepSpeed writes it."""
    held = dict_in(value, "optimizer_state_dict", path)
    unknown = sorted(str(key) for key in held.keys() - _KNOWN)
    unknown += sorted(str(key) for key in value.keys() - {"optimizer_state_dict", "ds_config", "ds_version"})
    if unknown:
        raise torch_values.mismatch(path, unknown[0], f"has {unknown[0]!r}, which Holdfast cannot import")
    stage = zero_files.stage(held, path)
    masters_key, state_key = (
        ("fp32_flat_groups", "optimizer_state_dict")
        if stage == 3
        else ("single_partition_of_fp32_groups", "base_optimizer_state")
    )
    masters = flat(list_in(held, masters_key, path), masters_key, path)
    base = dict_in(held, state_key, path)
    count: Any = held.get("partition_count")
    scaler = held.get("loss_scaler")
    return ZeroRank(
        path,
        stage,
        tuple(count) if isinstance(count, list | tuple) else (count,),
        tuple(array.stored(f"{masters_key}[{number}]") for number, array in enumerate(masters)),
        _states(base, len(masters), path),
        tuple(group for group in list_in(base, "param_groups", path) if isinstance(group, dict)),
        _paddings(held.get("param_alignment_paddings"), path),
        _fragments(held.get("param_slice_mappings"), path),
        scaler if isinstance(scaler, PickledRecord) else None,
    )


def _states(base: Mapping[str, Any], groups: int, path: str) -> tuple[Mapping[str, Any], ...]:
    state = dict_in(base, "state", path)
    if not state:
        return ()
    if list(state) != list(range(groups)) or not all(isinstance(kinds, dict) for kinds in state.values()):
        raise torch_values.mismatch(path, "state", f"has optimizer state for {len(state)} tensors, but {groups} flat groups")
    return tuple(state.values())


def _paddings(given: Any, path: str) -> list[list[int]] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(one, list | tuple) for one in given):
        raise torch_values.mismatch(path, "param_alignment_paddings", "has paddings that are not lists")
    paddings = [list(one) for one in given]
    if not all(type(n) is int and n >= 0 for one in paddings for n in one):
        raise torch_values.mismatch(path, "param_alignment_paddings", "has paddings that are not numbers")
    return paddings


def _fragments(given: Any, path: str) -> list[dict[str, tuple[int, int]]] | None:
    if not isinstance(given, list):
        return None
    fragments = []
    for group in given:
        if not isinstance(group, dict) or not all(isinstance(one, PickledRecord) for one in group.values()):
            raise torch_values.mismatch(path, "param_slice_mappings", "has locations of unknown parameters")
        fragments.append({str(name): (one.get("start"), one.get("numel")) for name, one in group.items()})
    return fragments


def optimizer_tensors(
    parameters: Sequence[FlatParameter], ranks: Sequence[ZeroRank], stage: int, files: Files
) -> Iterator[ForeignTensor]:
    """The optimizer's state by parameter: flat kinds are cut as the masters are, numbers are those of the group."""
    first = ranks[0]
    if any(len(rank.state) != len(first.state) for rank in ranks):
        raise torch_values.mismatch(
            ranks[-1].path, "state", "has optimizer state while other ranks lack it, or lacks it while they have it"
        )
    if not first.state:
        return
    kinds = {kind for rank in ranks for state in rank.state for kind in state}
    for kind in sorted(kinds | {STEP}):
        held = [[state.get(kind) for state in rank.state] for rank in ranks]
        if all(isinstance(value, PickledArray) and value.shape for values in held for value in values):
            yield from _flat_kind(parameters, ranks, stage, kind)
        else:
            yield from _number(parameters, ranks, kind, files)


def _flat_kind(
    parameters: Sequence[FlatParameter], ranks: Sequence[ZeroRank], stage: int, kind: str
) -> Iterator[ForeignTensor]:
    by_rank = []
    for rank in ranks:
        arrays = flat([state[kind] for state in rank.state], f"state/{kind}", rank.path)
        by_rank.append([array.stored(kind) for array in arrays])
        for group, (array, master) in enumerate(zip(by_rank[-1], rank.masters, strict=True)):
            last = stage < 3 and rank is ranks[-1]  # its masters are stored without the padding at the end
            if array.shape[0] < master.shape[0] or (array.shape != master.shape and not last):
                raise torch_values.mismatch(rank.path, kind, f"has {array.shape[0]} elements of {kind} in group {group}")
    lanes = by_rank if stage == 3 else [list(lane) for lane in zip(*by_rank, strict=True)]
    for parameter in parameters:
        spec = TensorSpec(optimizer_state.GROUP, f"{parameter.name}/{kind}", lanes[0][0].dtype, parameter.shape)
        yield ForeignTensor(spec, zero_partitions.pieces(parameter, lanes))


def _number(
    parameters: Sequence[FlatParameter], ranks: Sequence[ZeroRank], kind: str, files: Files
) -> Iterator[ForeignTensor]:
    """A number of each group, equal on all ranks, as a scalar tensor of each of its parameters."""
    values = []
    for rank in ranks:
        own = [_value(rank, group, kind, files) for group in range(len(rank.masters))]
        values.append(own)
        if own != values[0]:
            raise torch_values.mismatch(rank.path, kind, f"has {kind} = {own}, but {ranks[0].path} has {values[0]}")
    for parameter in parameters:
        key = TensorKey(optimizer_state.GROUP, f"{parameter.name}/{kind}")
        yield scalar(key, values[0][parameter.group])


def _value(rank: ZeroRank, group: int, kind: str, files: Files) -> float:
    """A number of the state, or of the parameter group, where fused optimizers have the step."""
    value = rank.state[group].get(kind)
    if value is None and kind == STEP:
        position = group if len(rank.groups) == len(rank.masters) else 0
        value = rank.groups[position].get(STEP) if rank.groups else None
    if isinstance(value, PickledArray) and not value.shape:
        dtype = dtypes.to_numpy(value.dtype)
        value = np.frombuffer(files.read(value.file, value.offset, dtype.itemsize), dtype)[0].item()
    if type(value) not in (int, float) or float(np.float32(value)) != value:
        raise torch_values.mismatch(rank.path, kind, f"has {kind!r} of group {group}, which is neither flat nor a number")
    return float(value)


def parameter_groups(
    parameters: Sequence[FlatParameter], rank: ZeroRank, stage: int
) -> list[tuple[Sequence[str], Mapping[str, Any]]]:
    """Names and hyper-parameters of each group, for the optimizer's document; one without any if they do not fit."""
    flat_of = [group.get("params") for group in rank.groups] if stage == 3 else [[n] for n in range(len(rank.groups))]
    if sorted(n for held in flat_of if isinstance(held, list) for n in held) != list(range(len(rank.masters))):
        return [([parameter.name for parameter in parameters], {})]
    groups: list[tuple[Sequence[str], Mapping[str, Any]]] = []
    for held, group in zip(flat_of, rank.groups, strict=True):
        names = [parameter.name for parameter in parameters if parameter.group in (held or ())]
        hyper = {
            str(key): torch_values.plain(one, rank.path, str(key)) for key, one in group.items() if key not in _NO_HYPER
        }
        groups.append((names, hyper))
    return groups

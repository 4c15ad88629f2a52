"""Exports a training as a universal checkpoint of DeepSpeed, which ZeRO 1, 2 and 3 load in any number of ranks.

latest_universal                                     TAG
TAG/zero/NAME/{fp32,exp_avg,exp_avg_sq,step,…}.pt    a parameter's master and state, each whole
TAG/zero/optimizer_state.pt                          hyper-parameters of the groups, loss scale
TAG/[zero_pp_rank_0_]mp_rank_00_model_states.pt      counters and scheduler, of ZeRO 3 and of 1 and 2
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from holdfast_formats.errors import InvalidRequest, NoSuchResource, StateMismatch
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import is_of_rank
from holdfast_formats.mapping.reading import elements
from holdfast_formats.mapping.target_files import GrowingFile, LiteralBytes, TargetFile
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.exports import deepspeed_progress, weights
from holdfast_service.wings.convert.exports.deepspeed_progress import VERSION, DeepSpeedProgress
from holdfast_service.wings.convert.exports.ordered_tensors import Arranged, arrange, renamed_documents
from holdfast_service.wings.convert.exports.plan import (
    ExportKind,
    ExportOptions,
    ExportPlan,
    LeftOut,
    copied_assets,
    other_groups,
    small_file,
    values_of_weights,
)
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.exports.tied_tensors import said
from holdfast_service.wings.convert.foreign import json_values, torch_zips

NAME = "deepspeed-universal"
LATEST = "latest_universal"
GROUP = "zero"  # of the target's tensors
STEP, MASTER = "step", "fp32"
_STAGE = 1  # as which whole tensors are read by others; DeepSpeed itself asks for none here
_NO_HYPER = ("params", "param_names")
_FLOATS = ("F32", "BF16", "F16")
_HINT = "export with --as dcp, which holds any state"
_NOT_LOADED = "DeepSpeed loads only what an optimizer trains from a universal checkpoint; the engine keeps its own"


class _ParameterGroup(NamedTuple):
    names: tuple[str, ...]
    hyper: Mapping[str, Any]


class _Parameter(NamedTuple):
    """A parameter's master and the other tensors of its state by kind, each of its shape."""

    name: str
    tensors: Mapping[str, MappedTensor]
    step: MappedTensor | None


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """All that DeepSpeed loads, under the checkpoint's names or those of a program.

    Raises `NoSuchResource` without an optimizer, `StateMismatch` for state that has no place.
    """
    if options.layout is not None or options.dtype is not None or options.weights != weights.GROUP:
        raise InvalidRequest("a training is exported unchanged", hint="leave --layout, --dtype and --weights out")
    arranged = arrange(source, options.program)
    groups = _groups(renamed_documents(source, arranged).get(optimizer_state.GROUP, {}))
    parameters = [_parameter(arranged, name) for group in groups for name in group.names]
    progress = deepspeed_progress.read(source)
    step = _step(source, parameters)
    tag = f"global_step{progress.counters['global_steps']}_universal"
    files = [small_file(LATEST, tag.encode()), _state_file(tag, groups, progress, step)]
    dtypes = {arranged.group(weights.GROUP)[one.name].spec.dtype for one in parameters}
    states = torch_zips.of_value(progress.model_states(dtypes.pop() if len(dtypes) == 1 else "F32"))
    files += [small_file(f"{tag}/{name}", states) for name in (deepspeed_progress.MODEL, deepspeed_progress.MODEL_OF_3)]
    aliases: dict[str, list[str]] = {}
    for alias, name in source.ties(weights.GROUP).items() if options.program is None else ():
        aliases.setdefault(name, []).append(alias)
    for parameter in parameters:
        for name in (parameter.name, *aliases.get(parameter.name, ())):
            files += _parameter_files(f"{tag}/{GROUP}/{name}", parameter, step)
    notes = [*arranged.notes, *progress.notes, *_notes(arranged, groups)]
    notes += said({alias: name for name, held in aliases.items() for alias in held})
    left_out = _left_out(source, arranged, parameters) + list(progress.left_out)
    return ExportPlan((*files, *copied_assets(source)), tuple(notes), tuple(left_out))


def _groups(documents: Mapping[str, Any]) -> list[_ParameterGroup]:
    held = list(documents.values())
    if len(held) != 1 or not optimizer_state.is_document(held[0]):
        raise NoSuchResource(
            f"DeepSpeed trains with one optimizer, but the checkpoint has {len(held)}",
            hint="export only the model with --as hf, or all with --as dcp",
        )

    def stored(_: str, name: str) -> Any:
        raise StateMismatch(f"DeepSpeed has no place for the tensor {name!r} in an optimizer's settings", hint=_HINT)

    document = json_values.decode(held[0], stored)
    kept = {kind for state in document.get("state", {}).values() for kind in state} - {STEP}
    if kept:
        raise StateMismatch(f"DeepSpeed has no place for {min(kept)!r}, which is no tensor", hint=_HINT)
    groups = document["groups"].values()
    return [
        _ParameterGroup(tuple(one["params"]), {key: value for key, value in one.items() if key not in _NO_HYPER})
        for one in groups
    ]


def _parameter(arranged: Arranged, name: str) -> _Parameter:
    weight = arranged.group(weights.GROUP).get(name)
    if weight is None:
        raise StateMismatch(f"the optimizer trains {name!r}, which the model does not have", hint=_HINT, tensor=name)
    if "/" in name or "\0" in name or name in (".", ".."):
        raise StateMismatch(f"{name!r} is no name of a directory, in which DeepSpeed keeps a parameter", hint=_HINT)
    master = arranged.group(optimizer_state.MASTER_GROUP).get(name, weight)
    if master.spec.dtype not in _FLOATS:
        raise StateMismatch(f"{name!r} is {master.spec.dtype}; DeepSpeed keeps masters in F32", hint=_HINT, tensor=name)
    tensors, step = {MASTER: _placed(master, name, MASTER)}, None
    prefix = f"{name}/"
    for key, one in arranged.group(optimizer_state.GROUP).items():
        kind = key.removeprefix(prefix)
        if not key.startswith(prefix) or "/" in kind:
            continue
        if kind == STEP:
            step = one
        else:
            tensors[kind] = _placed(one, name, kind)
    odd = next((one for one in tensors.values() if one.spec.shape != weight.spec.shape), None)
    if odd is not None:
        raise StateMismatch(
            f"{odd.spec.name!r} has another shape than its parameter, for which DeepSpeed has no place", hint=_HINT
        )
    return _Parameter(name, tensors, step)


def _placed(mapped: MappedTensor, name: str, kind: str) -> MappedTensor:
    dtype = "F32" if kind == MASTER else mapped.spec.dtype
    return mapped._replace(spec=TensorSpec(GROUP, f"{name}/{kind}", dtype, mapped.spec.shape))


def _step(source: ExportSource, parameters: list[_Parameter]) -> np.ndarray[Any, Any] | None:
    """The number of steps, which all parameters of DeepSpeed share; None if the optimizer keeps none by parameter."""
    held = [one.step for one in parameters if one.step is not None]
    if not held:
        return None
    values = {
        elements(source.files, source.listing.tensors, one, 0, 1).tobytes(): one for one in held if one.spec.dtype == "F32"
    }
    if len(values) != 1 or len(held) != len(parameters) or any(np.prod(one.spec.shape) != 1 for one in held):
        raise StateMismatch(
            "parameters have different step counts, or only some have one; DeepSpeed has one for all", hint=_HINT
        )
    return np.frombuffer(next(iter(values)), "<f4")


def _state_file(tag: str, groups: list[_ParameterGroup], progress: DeepSpeedProgress, step: Any) -> TargetFile:
    """The groups as ZeRO 1 and 2 read them, and as ZeRO 3 does, which takes those of the first group for all."""
    hyper = [{**group.hyper, "params": [number]} for number, group in enumerate(groups)]
    common = {"param_groups": hyper, "ds_version": VERSION, "zero_stage": _STAGE, **progress.scale}

    def within(count: Any) -> Any:
        return {**common, "optimizer_state_dict": {"state": {0: {STEP: count}}, "param_groups": hyper}}

    count = next((group.hyper[STEP] for group in groups if STEP in group.hyper), None)
    return _known_file(f"{tag}/{GROUP}/optimizer_state.pt", step, within, count)


def _known_file(name: str, step: Any, within: Callable[[Any], Any], otherwise: Any = None) -> TargetFile:
    """A torch file of a value around the step count, which is a tensor of torch's optimizers."""
    if step is None:
        return small_file(name, torch_zips.of_value(within(otherwise)))
    around, data = torch_zips.of_tensor(TensorSpec(GROUP, STEP, "F32", ()), within), step.tobytes()
    return small_file(name, around.head + data + around.tail(zlib.crc32(data)))


def _parameter_files(place: str, parameter: _Parameter, step: Any) -> list[TargetFile]:
    files = [_tensor_file(f"{place}/{kind}.pt", tensor) for kind, tensor in parameter.tensors.items()]
    return files if step is None else [*files, _known_file(f"{place}/{STEP}.pt", step, lambda count: count)]


def _tensor_file(name: str, mapped: MappedTensor) -> TargetFile:
    around = torch_zips.of_tensor(mapped.spec, lambda tensor: {"param": tensor})
    file = GrowingFile()
    file.put(around.head)
    file.stream(mapped)
    start = file.bytes
    file.skip(around.tail_bytes)
    return file.made(name, lambda crcs: (LiteralBytes(start, around.tail(crcs[mapped.key])),))


def _notes(arranged: Arranged, groups: list[_ParameterGroup]) -> list[str]:
    masters = arranged.group(optimizer_state.MASTER_GROUP)
    model = arranged.group(weights.GROUP)
    without = [name for group in groups for name in group.names if name not in masters and model[name].spec.dtype != "F32"]
    notes = [f"without masters of their own, converted from the model: {weights.named(without)}"] if without else []
    if any(group.hyper != groups[0].hyper for group in groups):
        notes.append("groups have different hyper-parameters: ZeRO 3 loads those of the first group for all")
    return notes


def _left_out(source: ExportSource, arranged: Arranged, parameters: list[_Parameter]) -> list[LeftOut]:
    trained = {one.name for one in parameters}
    model = {name for name in arranged.group(weights.GROUP) if not is_of_rank(name)}
    left_out = [LeftOut(f"{weights.GROUP}/{name}", _NOT_LOADED) for name in sorted(model - trained)]
    for name in sorted(arranged.group(optimizer_state.MASTER_GROUP).keys() - trained):
        left_out.append(LeftOut(f"{optimizer_state.MASTER_GROUP}/{name}", _NOT_LOADED))
    owned = {f"{one.name}/{kind}" for one in parameters for kind in (*one.tensors, STEP)}
    left_out += [
        LeftOut(f"{optimizer_state.GROUP}/{name}", "no parameter group has its parameter")
        for name in sorted(arranged.group(optimizer_state.GROUP).keys() - owned)
    ]
    used = frozenset({weights.GROUP, optimizer_state.MASTER_GROUP, optimizer_state.GROUP})
    left_out += other_groups(source, used, _NOT_LOADED, kept=deepspeed_progress.USED)
    return left_out + values_of_weights(source)


KIND = ExportKind(NAME, EXPORT_KINDS[NAME], plan)

"""Universal checkpoints of DeepSpeed: each parameter's master and state whole, in files of its own.

TAG_universal/zero/NAME/{fp32,exp_avg,exp_avg_sq,step}.pt   of ZeRO 3 flat, without a step
TAG_universal/zero/optimizer_state.pt                       hyper-parameters of the groups, loss scale
TAG_universal/[zero_pp_rank_N_]mp_rank_NN_model_states.pt   weights, counters, schedule
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from holdfast_files.opened import join
from holdfast_formats import dtypes
from holdfast_formats.files import Files
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import FileUse, ForeignTensor, TensorKey
from holdfast_formats.region import Shape
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import torch_values
from holdfast_service.wings.convert.foreign.computed import rounded, scalar
from holdfast_service.wings.convert.foreign.deepspeed import files as zero_files
from holdfast_service.wings.convert.foreign.deepspeed.files import LATEST_UNIVERSAL, ZeroFiles, list_in, refused, shapes_in
from holdfast_service.wings.convert.foreign.deepspeed.optimizer import STEP, ZeroRank
from holdfast_service.wings.convert.foreign.pickles import PickledArray, PickledRecord

SUFFIX, ZERO, STATE = "_universal", "zero", "optimizer_state.pt"
_MASTER, _PARAMETER, _ENDING, _GROUP = "fp32", "param", ".pt", "model"
_FLAT = 3  # the stage whose tensors are stored flat
_LAYER = re.compile(r"layer_\d+-model_\d+-model_states\.pt")
_ABOUT = {_PARAMETER, "cat_dim", "vocab_tensor", "param_n_sub_params", "sub_param_shape"}  # of a file, besides its tensor
_AGAIN = "convert the checkpoint again: python -m deepspeed.checkpoint.ds_to_universal"


class UniversalParameter(NamedTuple):
    """A parameter's tensors by kind (`fp32`, `exp_avg` …), whole, and its number of steps, if it has one."""

    name: str
    tensors: Mapping[str, ForeignTensor]
    step: float | None

    @property
    def is_trained(self) -> bool:
        return len(self.tensors) > 1


class Universal(NamedTuple):
    """A checkpoint as read: model states (one, or by rank), and parameters, of which those without moments are not trained.

    `whole`: the model states have no weights, or parts of them. Then the weights are the masters, rounded to `dtype`.
    """

    held: ZeroFiles
    models: tuple[dict[str, Any], ...]
    parameters: tuple[UniversalParameter, ...]
    groups: tuple[tuple[Sequence[str], Mapping[str, Any]], ...]
    state: ZeroRank
    whole: bool
    dtype: str
    uses: tuple[FileUse, ...]

    @property
    def masters(self) -> dict[str, ForeignTensor]:
        """Those of trained parameters, in F32."""
        return {one.name: one.tensors[_MASTER] for one in self.parameters if one.is_trained}


def tag(files: Files) -> str | None:
    """The directory of the checkpoint: the source itself, the one in `latest_universal`, or the only one; None without."""
    names = files.list("")
    if _is_universal(files, ""):
        return ""
    if LATEST_UNIVERSAL in names:
        latest = files.read(LATEST_UNIVERSAL, 0, zero_files.LATEST_BYTES_MAX).decode("utf-8", "replace").strip()
        return latest if latest in names and _is_universal(files, latest) else None
    tags = [name for name in names if name.endswith(SUFFIX) and _is_universal(files, name)]
    return tags[0] if len(tags) == 1 else None


def _is_universal(files: Files, directory: str) -> bool:
    return files.size(join(directory, f"{ZERO}/{STATE}")) is not None


def read(files: Files, directory: str) -> Universal:
    """All of it; `StateMismatch` by file and key for anything that DeepSpeed does not write."""
    state_path = join(directory, f"{ZERO}/{STATE}")
    state = zero_files.read(files, state_path)
    stage = zero_files.stage(state, state_path)
    names, unused = _model_files(files, directory, stage)
    models = tuple(zero_files.read(files, join(directory, name)) for name in names)
    whole = _is_whole(models)
    stored = [name for name in files.list(join(directory, ZERO)) if name != STATE]
    if whole and stage == _FLAT:
        what = "has no weights, and was made with parallelism or by an export"
        raise refused(join(directory, names[0]), what, "convert a checkpoint of ZeRO 3 without parallelism")
    shapes = [dict.fromkeys(stored)] if whole else _shapes(models[0], join(directory, names[0]))
    trained = {name: shape for group in shapes for name, shape in group.items()}
    stated = _stated_step(state, state_path, files)
    parameters, uses = [], [FileUse(join(directory, name), "tensors") for name in names]
    for name, shape in trained.items():
        place = join(directory, f"{ZERO}/{name}")
        if name not in stored:
            raise refused(place, "is missing, although the model was trained with it", "copy the whole checkpoint")
        parameter, paths = _parameter(files, place, name, shape)
        parameters.append(parameter if parameter.step is not None else parameter._replace(step=stated))
        uses += [FileUse(path, "tensors") for path in paths]
    again = [join(directory, f"{ZERO}/{name}/{file}") for name in stored if name not in trained
             for file in files.list(join(directory, f"{ZERO}/{name}"))]  # fmt: skip
    uses += [FileUse(path, "unused", "the same values as in the model states") for path in again]
    uses += [FileUse(state_path, "state"), *unused]
    scaler = state.get("loss_scaler")
    scaler = scaler if isinstance(scaler, PickledRecord) else None
    rank = ZeroRank(state_path, stage, (), (), (), (), None, None, scaler)
    held = ZeroFiles(directory, names, ())
    groups = _groups(state, shapes, parameters, rank)
    return Universal(held, models, tuple(parameters), groups, rank, whole, _dtype(models[0]), tuple(uses))


def optimizer_tensors(universal: Universal) -> list[ForeignTensor]:
    """The state of the parameters, each under its name."""
    made = []
    for one in universal.parameters:
        made += [tensor for kind, tensor in one.tensors.items() if kind != _MASTER]
        if one.step is not None and one.is_trained:
            made.append(scalar(TensorKey(optimizer_state.GROUP, f"{one.name}/{STEP}"), one.step))
    return made


def whole_weights(universal: Universal) -> list[ForeignTensor]:
    """Weights out of the masters, rounded as DeepSpeed does after a step, with the masters if they differ; and values that
    are not trained, in their own dtype.
    """
    made = []
    for one in universal.parameters:
        master, key = one.tensors[_MASTER], TensorKey(_GROUP, one.name)
        spec = master.spec
        if not one.is_trained or universal.dtype == spec.dtype:
            made.append(master._replace(spec=TensorSpec(key.group, key.name, spec.dtype, spec.shape)))
        else:
            made += [rounded(master, key, universal.dtype), master]
    return made


def _model_files(files: Files, directory: str, stage: int) -> tuple[tuple[str, ...], list[FileUse]]:
    """The model states that the stage reads: one file, or in ZeRO 3 one of each rank; and the other files."""
    ranks = {name: zero_files.model_rank(name) for name in files.list(directory) if zero_files.is_model(name)}
    numbered = sorted((rank, name) for name, rank in ranks.items() if rank is not None)
    single = sorted(name for name, rank in ranks.items() if rank is None)
    names = tuple(name for _, name in numbered) if stage == _FLAT and numbered else tuple(single or [n for _, n in numbered])
    if not names:
        raise refused(directory or "the directory", "has no file of model states", "copy the whole checkpoint")
    others = sorted(ranks.keys() - {*names})
    unused = [FileUse(join(directory, name), "unused", "the same values for another stage") for name in others]
    for name in files.list(directory) if directory else ():
        if _LAYER.fullmatch(name):
            unused.append(FileUse(join(directory, name), "unused", "weights of a layer, whose masters are read"))
        elif name not in ranks and name != ZERO:
            raise refused(join(directory, name), "does not belong to a universal checkpoint", f"--leave-out {name}")
    return names, unused


def _is_whole(models: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the model states have no weights, or only parts of them (tensor and pipeline parallelism)."""
    dimensions = models[0].get("checkpoint_parallel_dimensions")
    degrees = [*dimensions.values()] if isinstance(dimensions, dict) else []
    return not models[0].get("module") or models[0].get("mp_world_size") not in (1, None) or any(n != 1 for n in degrees)


def _dtype(model: Mapping[str, Any]) -> str:
    """The dtype that the model computes in, by DeepSpeed's configuration."""
    config = model.get("ds_config")
    for key, dtype in (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16")):
        held = config.get(key) if isinstance(config, dict) else None
        if isinstance(held, dict) and held.get("enabled") is True:
            return dtype
    return "F32"


def _shapes(model: Mapping[str, Any], path: str) -> list[dict[str, Shape | None]]:
    """The shapes of the trained parameters by group."""
    listed = list_in(model, "param_shapes", path)
    shapes = [shapes_in({str(number): one}, str(number), path) for number, one in enumerate(listed)]
    if len({name for group in shapes for name in group}) != sum(map(len, shapes)):
        raise refused(path, "lists a parameter in two groups")
    return [dict(group) for group in shapes]


def _parameter(files: Files, place: str, name: str, shape: Shape | None) -> tuple[UniversalParameter, list[str]]:
    tensors: dict[str, ForeignTensor] = {}
    step, paths = None, []
    for file in files.list(place):
        path, kind = f"{place}/{file}", file.removesuffix(_ENDING)
        if not file.endswith(_ENDING) or files.size(path) is None:
            raise refused(path, "does not belong to a universal checkpoint", f"move it out of the directory: {file}")
        paths.append(path)
        value = zero_files.read_value(files, path)
        if kind == STEP:
            step = _number(value, path, files)
        else:
            tensors[kind] = _tensor(value, path, TensorKey(optimizer_state.GROUP, f"{name}/{kind}"), shape)
    if _MASTER not in tensors:
        raise refused(f"{place}/{_MASTER}{_ENDING}", "is missing", "copy the whole checkpoint")
    master = tensors[_MASTER]
    odd = next((one for one in tensors.values() if one.spec.shape != master.spec.shape), None)
    if odd is not None:
        raise refused(f"{place}/{_MASTER}{_ENDING}", f"has another shape than {odd.spec.name!r}", _AGAIN)
    spec = TensorSpec(optimizer_state.MASTER_GROUP, name, master.spec.dtype, master.spec.shape)
    return UniversalParameter(name, {**tensors, _MASTER: master._replace(spec=spec)}, step), paths


def _tensor(value: Any, path: str, key: TensorKey, shape: Shape | None) -> ForeignTensor:
    """A whole tensor, which ZeRO 3 stores flat."""
    if isinstance(value, dict):
        unknown = sorted(str(one) for one in value.keys() - _ABOUT)
        if unknown:
            raise torch_values.mismatch(path, unknown[0], f"has {unknown[0]!r}, which Holdfast cannot import", _AGAIN)
        value = value.get(_PARAMETER)
    if not isinstance(value, PickledArray):
        raise torch_values.mismatch(path, _PARAMETER, "has no tensor", _AGAIN)
    shape = value.shape if shape is None else shape
    spec = TensorSpec(key.group, key.name, value.dtype, shape)
    spec.check()
    stored = value.stored(key.name)
    if value.shape == shape:
        return ForeignTensor(spec, (stored.all(),))
    if value.shape != (prod(shape),):
        what = f"has shape {list(value.shape)}, but the parameter has {list(shape)}"
        raise torch_values.mismatch(path, _PARAMETER, what, _AGAIN)
    return ForeignTensor(spec, tuple(stored.run(0, 0, prod(shape), shape)))


def _number(value: Any, path: str, files: Files) -> float:
    if isinstance(value, PickledArray) and prod(value.shape) == 1:
        dtype = dtypes.to_numpy(value.dtype)
        value = np.frombuffer(files.read(value.file, value.offset, dtype.itemsize), dtype)[0].item()
    if type(value) not in (int, float) or float(np.float32(value)) != value:
        raise torch_values.mismatch(path, STEP, "has no number of steps", _AGAIN)
    return float(value)


def _stated_step(state: Mapping[str, Any], path: str, files: Files) -> float | None:
    """The step that ZeRO 3 keeps for all parameters, and fused optimizers in their groups."""
    held = state.get("optimizer_state_dict")
    inner = held.get("state") if isinstance(held, dict) else None
    first = next(iter(inner.values()), None) if isinstance(inner, dict) else None
    groups = state.get("param_groups")
    for one in (first, groups[0] if isinstance(groups, list) and groups else None):
        if isinstance(one, dict) and STEP in one:
            return _number(one[STEP], path, files)
    return None


def _groups(
    state: Mapping[str, Any],
    shapes: Sequence[Mapping[str, Shape | None]],
    parameters: Sequence[UniversalParameter],
    rank: ZeroRank,
) -> tuple[tuple[Sequence[str], Mapping[str, Any]], ...]:
    """Names and hyper-parameters by group; ZeRO 3 has hyper-parameters of one group only, which are not taken."""
    held = [one for one in list_in(state, "param_groups", rank.path) if isinstance(one, dict)]
    trained = {one.name for one in parameters if one.is_trained}
    named = [[name for name in group if name in trained] for group in shapes]
    if len(held) != len(shapes) or rank.stage == _FLAT:
        return (([name for group in named for name in group], {}),)
    own, path = ("params", "param_names", STEP), rank.path
    return tuple(
        (group, {str(key): torch_values.plain(value, path, str(key)) for key, value in one.items() if key not in own})
        for group, one in zip(named, held, strict=True)
    )

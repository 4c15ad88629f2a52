"""DeepSpeed checkpoints of ZeRO 1, 2 and 3: weights, FP32 masters and optimizer state as whole tensors by name.

Weights are those of the module. ZeRO 3 stores none: they are the masters, rounded as DeepSpeed does after a step. If the
module computes in FP32, masters equal weights, and are compared instead of listed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast_formats.files import Files
from holdfast_formats.mapping import optimizer_state
from holdfast_formats.mapping.listing import ForeignListing, ForeignTensor, TensorKey
from holdfast_formats.rest.jobs import IMPORT_KINDS, ReadOptions
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import torch_values
from holdfast_service.wings.convert.foreign.computed import rounded
from holdfast_service.wings.convert.foreign.deepspeed import files as zero_files
from holdfast_service.wings.convert.foreign.deepspeed import tensor_parallel, universal, unused_files, zero_partitions
from holdfast_service.wings.convert.foreign.deepspeed.files import ZeroFiles, dict_in, flat, list_in, refused, shapes_in
from holdfast_service.wings.convert.foreign.deepspeed.optimizer import (
    ZeroRank,
    optimizer_tensors,
    parameter_groups,
    rank_state,
)
from holdfast_service.wings.convert.foreign.deepspeed.universal import Universal
from holdfast_service.wings.convert.foreign.deepspeed.zero_partitions import FlatParameter
from holdfast_service.wings.convert.foreign.kinds import ForeignKind

GROUP = "model"
_ROUNDED = "weights are the FP32 master copies, rounded to {}: the model states have none, or parts of them"
_LEFT_OUT = "hyper-parameters are not imported, because groups do not fit the partitions: the trainer keeps its own"


class _Saved(NamedTuple):
    """A checkpoint's files, as read: model states (one, or by rank), and the optimizer's by rank."""

    held: ZeroFiles
    models: Sequence[dict[str, Any]]
    ranks: Sequence[ZeroRank]
    stage: int

    @property
    def model_path(self) -> str:
        return self.held.path(self.held.models[0])


def recognises(files: Files) -> bool:
    """A directory `global_stepN` with optimizer states by rank, or such a directory itself."""
    return zero_files.tag(files) is not None or universal.tag(files) is not None


def read(files: Files, options: ReadOptions) -> ForeignListing:
    """The listing of the checkpoint in `latest`; `StateMismatch` and `CorruptManifest` by file and key."""
    directory = zero_files.tag(files)
    whole = universal.tag(files) if directory is None else None
    if whole is not None:
        return _read_universal(files, universal.read(files, whole))
    if directory is None:
        raise refused(zero_files.LATEST, "does not name a directory with ZeRO optimizer states", "copy the whole checkpoint")
    ranks = zero_files.sort_out(files, directory)
    every = [_read(files, held, len(ranks)) for held in ranks]
    saved, notes = every[0], list[str]()
    parameters, made = _tensors(files, saved, notes)
    if len(every) > 1:
        parts = [made, *(_tensors(files, one, [])[1] for one in every[1:])]
        made = list(tensor_parallel.joined(parts, _rules(every)))
        notes.append(f"the parts of {len(every)} tensor-parallel ranks were joined as ds_to_universal joins them")
    listed: dict[TensorKey, ForeignTensor] = {}
    for tensor in made:
        tensor.spec.check()
        if tensor.key in listed:
            raise torch_values.mismatch(saved.model_path, tensor.spec.name, f"has {tensor.spec.name!r} twice")
        listed[tensor.key] = tensor
    groups = parameter_groups(parameters, saved.ranks[0], saved.stage)
    if not all(hyper for _, hyper in groups):
        notes.append(_LEFT_OUT)
    documents = unused_files.documents(saved.models[0], saved.ranks[0], saved.model_path)
    documents["optim"] = {optimizer_state.KEY: optimizer_state.document(groups)}
    all_of_them = ZeroFiles(directory, *(tuple(name for held in ranks for name in held[kind]) for kind in (1, 2)))
    uses, assets = unused_files.uses(files, all_of_them)
    step = torch_values.integer(saved.models[0], "global_steps", saved.model_path)
    return ForeignListing(KIND.name, listed, uses, documents, assets, tuple(notes), step)


def _read_universal(files: Files, found: Universal) -> ForeignListing:
    path = found.held.path(found.held.models[0])
    if found.whole:
        tensors, notes = universal.whole_weights(found), [_ROUNDED.format(found.dtype)]
    else:
        saved = _Saved(found.held, found.models, (), found.state.stage)
        tensors, notes = _weights(saved, found.masters)
    made = {one.key: one for one in (*tensors, *universal.optimizer_tensors(found))}
    for tensor in made.values():
        tensor.spec.check()
    if found.state.stage == 3:
        notes.append(_LEFT_OUT)
    documents = unused_files.documents(found.models[0], found.state, path)
    documents["optim"] = {optimizer_state.KEY: optimizer_state.document(found.groups)}
    uses, assets = unused_files.uses(files, found.held, found.uses)
    step = torch_values.integer(found.models[0], "global_steps", path)
    return ForeignListing(KIND.name, made, uses, documents, assets, tuple(notes), step)


def _tensors(files: Files, saved: _Saved, notes: list[str]) -> tuple[list[FlatParameter], list[ForeignTensor]]:
    """The parameters and all tensors of one tensor-parallel rank. Adds to `notes`."""
    parameters, lanes = _parameters(saved)
    tensors, more = _weights(saved, {one.name: _master(one, lanes) for one in parameters})
    notes += more
    return parameters, [*tensors, *optimizer_tensors(parameters, saved.ranks, saved.stage, files)]


def _rules(every: Sequence[_Saved]) -> tensor_parallel.JoiningRules:
    """The rules by which all tensor-parallel ranks are joined, which must be of one step and of ZeRO 1 or 2."""
    first = every[0]
    for one in every:
        if one.stage == 3 or one.stage != first.stage:
            raise refused(one.model_path, "is of ZeRO 3 with tensor parallelism", zero_files.OF_PARTS)
        if one.models[0].get("global_steps") != first.models[0].get("global_steps"):
            raise refused(one.model_path, "is from a step other than that of the other files", "copy all of one checkpoint")
    return tensor_parallel.rules(first.models[0], first.model_path)


def _read(files: Files, held: ZeroFiles, parallel: int) -> _Saved:
    """The files of one of so many tensor-parallel ranks, checked to be of one step and of the stated number of ranks."""
    models = [zero_files.read(files, held.path(name)) for name in held.models]
    ranks = [rank_state(zero_files.read(files, held.path(name)), held.path(name)) for name in held.optimizers]
    stages = {rank.stage for rank in ranks}
    if len(stages) > 1 or (3 in stages) != (len(models) > 1 or held.models[0].startswith("zero_pp")):
        raise refused(ranks[-1].path, "is from another ZeRO stage than the other files", "copy all files of one checkpoint")
    for rank in ranks:
        if any(count != len(ranks) for count in rank.partitions):
            raise refused(rank.path, f"expects {rank.partitions} partitions, but {len(ranks)} ranks have files")
    for name, model in zip(held.models, models, strict=True):
        if model.get("global_steps") != models[0].get("global_steps") or model.get("mp_world_size", parallel) != parallel:
            what = "is from a step other than that of the other files, or of another number of tensor-parallel ranks"
            raise refused(held.path(name), what)
        if list_in(model, "param_shapes", held.path(name)) != models[0]["param_shapes"]:
            raise refused(
                held.path(name), "lists different parameters than the other files", "copy all files of one checkpoint"
            )
    return _Saved(held, models, ranks, stages.pop())


def _parameters(saved: _Saved) -> tuple[list[FlatParameter], zero_partitions.Lanes]:
    model, path = saved.models[0], saved.model_path
    groups = [shapes_in({str(number): shapes}, str(number), path) for number, shapes in enumerate(model["param_shapes"])]
    names = [name for shapes in groups for name in shapes]
    if len(set(names)) != len(names):
        raise refused(path, "lists a parameter in two groups")
    lanes: zero_partitions.Lanes
    if saved.stage == 3:
        lanes = [rank.masters for rank in saved.ranks]
        return zero_partitions.by_rank({name: shape for shapes in groups for name, shape in shapes.items()}, lanes), lanes
    for rank in saved.ranks:
        if len(rank.masters) != len(groups) or (
            rank.paddings is not None and list(map(len, rank.paddings)) != list(map(len, groups))
        ):
            raise refused(rank.path, f"has different parameter groups than {path}")
    lanes = [[rank.masters[group] for rank in saved.ranks] for group in range(len(groups))]
    parameters = zero_partitions.by_group(groups, saved.ranks[0].paddings, lanes)
    _check_fragments(parameters, saved.ranks, lanes)
    return parameters, lanes


def _check_fragments(parameters: Sequence[FlatParameter], ranks: Sequence[ZeroRank], lanes: zero_partitions.Lanes) -> None:
    """Check the fragments that newer files state against the computed ones."""
    for number, rank in enumerate(ranks):
        if rank.fragments is None:
            continue
        computed: list[dict[str, tuple[int, int]]] = [{} for _ in lanes]
        for parameter in parameters:
            for run in parameter.runs:
                begin = sum(array.shape[0] for array in lanes[run.lane][:number])
                low = max(run.first, begin)
                high = min(run.first + run.stop - run.start, begin + lanes[run.lane][number].shape[0])
                if low < high:
                    computed[run.lane][parameter.name] = (low - begin, high - low)
        for group, (own, stored) in enumerate(zip(computed, rank.fragments, strict=False)):
            wrong = sorted(name for name in own.keys() | stored.keys() if own.get(name) != stored.get(name))
            if wrong:
                raise torch_values.mismatch(rank.path, wrong[0], f"places {wrong[0]!r} of group {group} out of order")


def _master(parameter: FlatParameter, lanes: zero_partitions.Lanes) -> ForeignTensor:
    dtypes = {array.dtype for run in parameter.runs for array in lanes[run.lane]} or {"F32"}
    spec = TensorSpec(optimizer_state.MASTER_GROUP, parameter.name, dtypes.pop(), parameter.shape)
    return ForeignTensor(spec, zero_partitions.pieces(parameter, lanes))


def _weights(saved: _Saved, masters: Mapping[str, ForeignTensor]) -> tuple[list[ForeignTensor], list[str]]:
    """The module's weights and buffers, masters if they differ from weights, and notes."""
    module, path = dict_in(saved.models[0], "module", saved.model_path), saved.model_path
    buffers = _names(list_in(saved.models[0], "buffer_names", path), "buffer_names", path)
    shared = dict_in({"shared_params": saved.models[0].get("shared_params") or {}}, "shared_params", path)
    _names(list(shared.values()), "shared_params", path)
    frozen = _frozen(saved)
    missing = sorted(masters.keys() - module.keys())
    if missing:
        raise torch_values.mismatch(path, missing[0], f"lacks weight {missing[0]!r}, although its master copy exists")
    tensors, notes = [], list[str]()
    for tensor in torch_values.state_dict(module, path, GROUP).whole():
        name = tensor.spec.name
        master = masters.get(shared.get(name, name))
        if saved.stage == 3 and name not in buffers:
            tensors.append(_partitioned(tensor, master, frozen.get(shared.get(name, name)), path))
        elif master is not None:
            tensors.append(_compared(tensor, master, path))
        else:
            tensors.append(tensor)
    narrow = {tensor.spec.name for tensor in tensors if tensor.spec.dtype != "F32"}
    tensors += [master for name, master in masters.items() if name in narrow]
    if len(narrow & masters.keys()) < len(masters):
        notes.append("F32 weights are their own master copies, which are not stored again")
    if saved.stage == 3 and buffers:
        notes.append("buffers are taken from rank 0, as DeepSpeed's own conversion does")
    if saved.stage == 3 and narrow & masters.keys():
        notes.append("weights are rounded from the FP32 master copies, as DeepSpeed does: ZeRO 3 stores nothing else")
    return tensors, notes


def _names(given: list[Any], key: str, path: str) -> set[str]:
    if not all(type(name) is str for name in given):
        raise torch_values.mismatch(path, key, f"has {key!r}, which is not a list of names")
    return set(given)


def _compared(tensor: ForeignTensor, master: ForeignTensor, path: str) -> ForeignTensor:
    """A whole weight; one in F32 must be equal to its master."""
    if tensor.spec.shape != master.spec.shape:
        raise torch_values.mismatch(
            path,
            tensor.spec.name,
            f"has {tensor.spec.name!r} {list(tensor.spec.shape)}, but its master copy is {list(master.spec.shape)}",
        )
    return tensor._replace(copies=master.pieces) if tensor.spec.dtype == master.spec.dtype else tensor


def _partitioned(
    placeholder: ForeignTensor, master: ForeignTensor | None, frozen: ForeignTensor | None, path: str
) -> ForeignTensor:
    """A weight that ZeRO 3 stores as its master, or in parts if it was not trained."""
    name, dtype = placeholder.spec.name, placeholder.spec.dtype
    if master is not None:
        key = TensorKey(GROUP, name)
        if dtype == master.spec.dtype:
            return master._replace(spec=TensorSpec(GROUP, name, dtype, master.spec.shape))
        return rounded(master, key, dtype)
    if frozen is not None:
        return frozen._replace(spec=TensorSpec(GROUP, name, frozen.spec.dtype, frozen.spec.shape))
    if 0 in placeholder.spec.shape:
        raise torch_values.mismatch(path, name, f"has only a placeholder for {name!r}, and no file has its values")
    return placeholder


def _frozen(saved: _Saved) -> dict[str, ForeignTensor]:
    """Frozen parameters, of which each rank's model states have a part (ZeRO 3)."""
    shapes = saved.models[0].get("frozen_param_shapes") or {}
    if saved.stage != 3 or not shapes:
        return {}
    frozen = {}
    for name, shape in shapes_in({"frozen_param_shapes": shapes}, "frozen_param_shapes", saved.model_path).items():
        lanes = []
        for file, model in zip(saved.held.models, saved.models, strict=True):
            path = saved.held.path(file)
            part = dict_in(model, "frozen_param_fragments", path).get(name)
            lanes.append([array.stored(name) for array in flat([part], name, path)])
        (parameter,) = zero_partitions.by_rank({name: shape}, lanes)
        spec = TensorSpec(GROUP, name, lanes[0][0].dtype, shape)
        frozen[name] = ForeignTensor(spec, zero_partitions.pieces(parameter, lanes))
    return frozen


KIND = ForeignKind("deepspeed", IMPORT_KINDS["deepspeed"], recognises, read)

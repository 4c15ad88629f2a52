"""Exports a checkpoint of Paddle's sharding_io: pickles for two ranks of sharding stage 1, each with whole parameters.

PaddleFormers reshards it to any number of ranks and to either version of the stage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod

from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_formats.rest.jobs import EXPORT_KINDS
from holdfast_service.wings.convert.exports.hugging_face import configured
from holdfast_service.wings.convert.exports.paddle import state as paddle_state
from holdfast_service.wings.convert.exports.paddle.pickled_arrays import PickledArrays
from holdfast_service.wings.convert.exports.paddle.state import POWERS, PaddleState
from holdfast_service.wings.convert.exports.paddle.trainer import FILES, trainer_files
from holdfast_service.wings.convert.exports.plan import ExportKind, ExportOptions, ExportPlan, small_file
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.foreign.paddle.static_names import META

NAME = "paddle-sharding-io"
RANKS = 2  # Paddle reads no fewer
SIGNALS = tuple(f"saved_signal_{rank}" for rank in range(RANKS))
_PLACE = "tp00_pp00"
_STRATEGY = "ShardingV1"
_DTYPES = {"F32": 10, "F64": 11, "F16": 15, "BF16": 16}  # Paddle's numbers
_NOTE = (
    "parameters have static names of their own: load it with load_sharded_model_remap_parameter_name, which gives them "
    "the model's"
)


def plan(source: ExportSource, options: ExportOptions) -> ExportPlan:
    """Weights, and optimizer with masters, for each rank; the metadata; the trainer's small files, and the checkpoint's."""
    state = paddle_state.collect(source, options, model_too=True)
    model = {name: state.layout.of(name, tensor) for name, tensor in state.model.items()}
    ties = {} if options.program is not None else source.ties("model")
    statics = {name: f"parameter_{number}.w_0" for number, name in enumerate(name for name in model if name not in ties)}
    owners = _owners({name: model[name] for name in statics})
    files = [_optimizer(rank, state, statics, owners) for rank in range(RANKS)] if state.optimizer else []
    files += [
        _weights(rank, {name: model[name] for name in statics if owners[name] == rank}, statics) for rank in range(RANKS)
    ]
    names = {**statics, **{alias: statics[name] for alias, name in ties.items() if name in statics}}
    trainer = trainer_files(source, state)
    assets, notes = configured(source, options.dtype, FILES | {META, *SIGNALS})
    small = [_meta(model, names, owners), *(small_file(name, b"1") for name in SIGNALS), *trainer.files, *assets]
    return ExportPlan((*files, *small), (*state.notes, _NOTE, *trainer.notes, *notes), state.left_out)


def _owners(model: Mapping[str, MappedTensor]) -> dict[str, int]:
    """The rank of each parameter: the one with the fewest elements so far."""
    held, owners = [0] * RANKS, dict[str, int]()
    for name, tensor in model.items():
        rank = held.index(min(held))
        owners[name] = rank
        held[rank] += prod(tensor.spec.shape)
    return owners


def _weights(rank: int, model: Mapping[str, MappedTensor], statics: Mapping[str, str]) -> TargetFile:
    pickled = PickledArrays()
    for name, tensor in model.items():
        pickled.put(name, tensor)
    pickled.put_value("StructuredToParameterName@@", {name: statics[name] for name in model})
    return pickled.ended().made(f"model_state.shard{rank:02d}.pdparams")


def _optimizer(rank: int, state: PaddleState, statics: Mapping[str, str], owners: Mapping[str, int]) -> TargetFile:
    pickled = PickledArrays()
    own = [name for name in statics if owners[name] == rank]
    for name in own:
        prefix = f"{statics[name]}_fp32_master_0" if name in state.masters else statics[name]
        held = state.optimizer.get(name)
        if held is None:
            continue
        for kind, tensor in held.moments.items():
            pickled.put(f"{prefix}_{kind}", tensor, f"{prefix}_{kind}")
        for kind, value in zip(POWERS, held.powers, strict=True):
            key = f"{prefix}_{kind}"
            pickled.put(key, paddle_state.power_tensor("optimizer", key, value), key)
    pickled.begin_inner("master_weights")
    for name in own:
        if name in state.masters:
            pickled.put(statics[name], state.masters[name], f"{statics[name]}_fp32_master_0")
    pickled.end_inner()
    return pickled.ended().made(f"optimizer.shard{rank:02d}.pdopt")


def _meta(model: Mapping[str, MappedTensor], names: Mapping[str, str], owners: Mapping[str, int]) -> TargetFile:
    described = {
        name: [list(model[name].spec.shape), _DTYPES.get(model[name].spec.dtype, 0), False, False] for name in names
    }
    place = {
        "param2rank": {names[name]: rank for name, rank in owners.items()},
        "structure_name_mapping": names,
        "param_meta": described,
        "param_meta_keys": ["shape", "dtype", "is_distributed", "no_sync"],
        "sharding_strategy": _STRATEGY,
        "enable_overlap": False,
    }
    degrees = {"pp_degree": 1, "mp_degree": 1, "sharding_degree": RANKS, "ep_degree": 1, "moe_sharding_degree": 0}
    document = {"parallel_config": degrees, "sharding_metas": {_PLACE: place}}
    return small_file(META, json.dumps(document).encode() + b"\n")


KIND = ExportKind(NAME, EXPORT_KINDS[NAME], plan)

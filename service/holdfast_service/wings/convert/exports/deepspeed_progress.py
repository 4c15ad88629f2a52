"""What DeepSpeed keeps of a training beside tensors: counters, scheduler, loss scale and the user's `client_state`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_service.wings.convert.exports.plan import LeftOut
from holdfast_service.wings.convert.exports.source import ExportSource
from holdfast_service.wings.convert.foreign import json_values
from holdfast_service.wings.convert.foreign.pickle_writer import MadeObject, NamedGlobal

MODEL, MODEL_OF_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
VERSION = "0.14.0"  # the first release with this format for all stages of ZeRO; DeepSpeed asks for a version
# Keys of the group extra: of Holdfast's adapter, which imports from DeepSpeed have too, and of schedulers.
_ADAPTER, _SCHEDULERS = "deepspeed", ("scheduler", "lr_scheduler")
USED = frozenset(f"extra/{key}" for key in (_ADAPTER, *_SCHEDULERS))
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
_SCALER = NamedGlobal("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler")
_OF_SCALER = frozenset({"cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis"})
_FP16 = NamedGlobal("torch.float16")  # the only dtype whose loss is scaled


class DeepSpeedProgress(NamedTuple):
    """`scale` are entries of optimizer_state.pt."""

    counters: Mapping[str, int]
    scheduler: Any
    client_state: Mapping[str, Any]
    scale: Mapping[str, Any]
    notes: tuple[str, ...]
    left_out: tuple[LeftOut, ...]

    def model_states(self, dtype: str) -> dict[str, Any]:
        """The content of the file of model states, for weights of this dtype. It has none: DeepSpeed reads none there."""
        section = {"BF16": "bf16", "F16": "fp16"}.get(dtype)
        known = {"module": {}, "buffer_names": [], "optimizer": None, "lr_scheduler": self.scheduler, "data_sampler": None}
        known |= {"random_ltd": None, "sparse_tensor_module_names": [], "dp_world_size": 1, "mp_world_size": 1}
        known["ds_config"] = {} if section is None else {section: {"enabled": True}}
        return {**self.client_state, **known, **self.counters, "ds_version": VERSION}


def read(source: ExportSource) -> DeepSpeedProgress:
    """Of the checkpoint's values; a trainer without DeepSpeed has only the step. `StateMismatch` without a step."""
    left_out: list[LeftOut] = []
    held = {key: _decoded(source, key, left_out) for key in (_ADAPTER, *_SCHEDULERS)}
    adapter = _mapping(held[_ADAPTER])
    found = _mapping(adapter.get("counters"))
    counters = {key: found[key] for key in _COUNTERS if type(found.get(key)) is int}
    counters.setdefault("skipped_steps", 0)
    if "global_steps" not in counters:
        if source.listing.step is None:
            raise StateMismatch(
                "the source does not record the step of the training", hint="import it as RUN@STEP, and export that"
            )
        counters["global_steps"] = source.listing.step
    scheduler = next((held[key] for key in _SCHEDULERS if held[key] is not None), None)
    notes = (
        [] if scheduler is not None else ["the checkpoint has no state of a scheduler: load it into an engine without one"]
    )
    scaler = _mapping(adapter.get("loss_scale"))
    scale: dict[str, Any] = {}
    if scaler.keys() >= _OF_SCALER:
        scale = {"loss_scaler": MadeObject(_SCALER, {**scaler, "dtype": _FP16}), "dynamic_loss_scale": True}
    return DeepSpeedProgress(
        counters,
        scheduler,
        _mapping(adapter.get("client_state")),
        scale,
        tuple(notes),
        tuple(left_out),
    )


def _decoded(source: ExportSource, key: str, left_out: list[LeftOut]) -> Any:
    document = source.listing.documents.get("extra", {}).get(key)
    if document is None:
        return None

    def stored(_: str, name: str) -> Any:
        raise StateMismatch(f"it has the tensor {name!r}, which DeepSpeed keeps no place for")

    try:
        return json_values.decode(document, stored)
    except CheckpointError as error:
        left_out.append(LeftOut(f"extra/{key}", error.detail))
        return None


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

"""Refuses DeepSpeed engines of which a save would lose something that trains."""

from __future__ import annotations

from typing import Any

import torch

from holdfast_formats.errors import InvalidRequest

# The classes of engine.optimizer that `partitions` knows, by name, because importing all of them is slow.
PARTITIONED = frozenset(
    {"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "FP16_Optimizer", "FP16_UnfusedOptimizer"}
)
STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
_OFFLOAD = "offload to the CPU, or do not offload"


def check(engine: Any) -> None:
    """Raises `InvalidRequest` with the name of an unsupported engine or feature."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    if not isinstance(engine, DeepSpeedEngine):
        raise InvalidRequest(f"attach() takes a DeepSpeedEngine, not a {type(engine).__name__}")
    if type(engine) is not DeepSpeedEngine:
        raise _refused(f"engines of the class {type(engine).__name__}", "use the plain DeepSpeedEngine")
    if engine.has_moe_layers:
        raise _refused("models with MoE layers")
    if engine.mp_world_size > 1:
        raise _refused("tensor parallelism")
    if engine.sequence_parallel_size > 1:
        raise _refused("sequence parallelism")
    for what, on in (
        ("random_ltd", engine.random_ltd_enabled()),
        ("curriculum learning with a data sampler", engine.curriculum_learning_enabled()),
        ("DeepCompile", engine.is_deepcompile_enabled()),
    ):
        if on:
            raise _refused(what)
    _check_zero(engine)
    _check_optimizer(engine)


def _check_zero(engine: Any) -> None:
    zero = engine.zero_optimization_stage() and engine._config.zero_config  # no public name in 0.19.8
    if not zero:
        return
    for name in ("offload_optimizer", "offload_param"):
        offload = getattr(zero, name)
        if offload is not None and offload.device == "nvme":
            raise _refused(f"{name} to NVMe", _OFFLOAD)
        if getattr(offload, "ratio", 1.0) != 1.0:
            raise _refused(f"{name} with a ratio below 1", _OFFLOAD)
        if getattr(offload, "super_offload", False):
            raise _refused("SuperOffload", _OFFLOAD)
    for name, plain in (
        ("zero_hpz_partition_size", 1),
        ("zero_quantized_weights", False),
        ("zero_quantized_nontrainable_weights", False),
        ("zenflow", None),
    ):
        if getattr(zero, name, plain) != plain:
            raise _refused(f"{name}={getattr(zero, name)!r}")


def _check_optimizer(engine: Any) -> None:
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind in PARTITIONED:
        base = optimizer.optimizer
    elif isinstance(optimizer, torch.optim.Optimizer) and not engine.zero_optimization():
        base = optimizer
    else:
        raise _refused(f"an engine whose optimizer is a {kind}", "give the engine a supported optimizer")
    where = type(base).__module__
    if not isinstance(base, torch.optim.Optimizer) or where.startswith("deepspeed.runtime.fp16.onebit"):
        raise _refused(f"the optimizer {type(base).__name__} of {where}")
    if any(group.get("use_muon") for group in base.param_groups):
        raise _refused("the optimizer Muon")
    if kind in PARTITIONED and getattr(optimizer, "fused_adam_legacy", False):
        raise _refused("the legacy fused Adam")


def _refused(what: str, instead: str = "") -> InvalidRequest:
    return InvalidRequest(
        f"not supported: {what}, because Holdfast does not know where DeepSpeed then stores the training state",
        hint=f"{instead + ', or ' if instead else ''}save with DeepSpeed itself: do not attach Holdfast to this engine",
    )

"""Finds parameters that a framework marks as parts of larger ones: saved as they are, the rest would be silently lost."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.nn.parameter import is_lazy

from holdfast.tensors.fragments import Storable, is_sharded
from holdfast_formats.errors import InvalidRequest

_DEEPSPEED = ("ds_id", "ds_shape")  # set on every parameter that ZeRO-3 has partitioned
_PARTITIONED = (
    "DeepSpeed ZeRO-3 keeps parameters, masters and moments in its own partitions: attach the engine with "
    "holdfast.integrations.deepspeed.attach(engine, run)"
)


def check(path: str, tensors: Mapping[str, Storable], world: int, declared: bool) -> None:
    """Refuse partial tensors without a known place; `declared`: a layout has their places."""
    plain = {name: value for name, value in tensors.items() if isinstance(value, Tensor) and not is_sharded(value)}
    if any(is_lazy(value) for value in plain.values()):
        return  # refused by name where the leaf is made
    for name, value in plain.items():
        if any(hasattr(value, mark) for mark in _DEEPSPEED):
            shape = list(getattr(value, "ds_shape", ()))
            raise InvalidRequest(
                f"{path}: the parameter {name!r} is partitioned by DeepSpeed: its global shape is {shape}, "
                f"this rank's tensor has {list(value.shape)}",
                hint=_PARTITIONED,
            )
        if world > 1 and not declared and getattr(value, "tensor_model_parallel", False):
            raise InvalidRequest(
                f"{path}: the parameter {name!r} is marked tensor_model_parallel: this rank has a part of it, "
                "but its position is not known",
                hint='declare the parallel layout: Checkpointer(layout="tp=4,dp=2"); or use Fragments or DTensors',
            )
    if len(plain) > 1 and not declared and all(tuple(value.shape) == (0,) for value in tensors.values()):
        raise InvalidRequest(
            f"{path}: all {len(plain)} tensors are empty, for example {next(iter(plain))!r}: the trained "
            "values are elsewhere",
            hint=f"if this is DeepSpeed: {_PARTITIONED}",
        )

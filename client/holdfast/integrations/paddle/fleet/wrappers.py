"""The layer and the optimizer inside what fleet wraps around them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

_AROUND = frozenset({"DataParallel", "MetaParallelBase", "MixPrecisionLayer"})  # and what derives from them
_STAGE_3 = "GroupShardedStage3"
_SHARDED = frozenset({"GroupShardedStage2", _STAGE_3})


class Unwrapped(NamedTuple):
    """The user's own layer, and the wrapper of stage 3 of sharding around it, if there is one."""

    layer: Any
    stage_3: Any


def unwrapped(layer: Any) -> Unwrapped:
    """The layer inside what `fleet.distributed_model`, `paddle.DataParallel` and `group_sharded_parallel` return."""
    stage_3 = None
    while True:
        kinds = {each.__name__ for each in type(layer).__mro__ if each.__module__.partition(".")[0] == "paddle"}
        if kinds & _AROUND:
            layer = layer._layers
        elif kinds & _SHARDED:
            stage_3 = layer if _STAGE_3 in kinds else stage_3
            layer = layer._layer
        else:
            return Unwrapped(layer, stage_3)


def optimizers_inside(optimizer: Any) -> Iterator[Any]:
    """An optimizer and those that it wraps, from the outermost on; the last keeps the state."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield optimizer
        held = getattr(optimizer, "__dict__", {})
        optimizer = held.get("_inner_opt") or held.get("_optim")


def innermost(optimizer: Any) -> Any:
    """The optimizer that keeps the state; anything else, and None, as it is."""
    *_, last = optimizers_inside(optimizer) if optimizer is not None else [None]
    return last

"""Reads the tensors of a module under FSDP1 off its flat parameters; nothing is gathered, and no rank waits for another.

`FullyShardedDataParallel` puts the parameters of a unit end to end and leaves each rank a flat range of the result. The
place of each parameter in it is in the unit's `FlatParamHandle` (`torch.distributed.fsdp._flat_param`, the same since torch
2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast.tensors.fragments import Fragment, Storable
from holdfast_formats.errors import InvalidRequest

WRAPPER = "FullyShardedDataParallel"
EXTRA_STATE = "_extra_state"


class FlatState(NamedTuple):
    """Tensors and modules' own values, by name as in the wrappers. `release` frees outdated memory after a restore."""

    tensors: dict[str, Storable]
    extras: dict[str, tuple[nn.Module, Any]]
    release: tuple[Callable[[], None], ...]


def is_flat(module: nn.Module) -> bool:
    """Whether a module has parameters under FSDP1."""
    return any(type(child).__name__ == WRAPPER for child in module.modules())


def flat_state(module: nn.Module, path: str) -> FlatState:
    """The persistent tensors of a module with units of FSDP1: Fragments of the flat shards, and all other tensors.

    Raises `InvalidRequest` with the unit's path if an optimizer holds flat parameters whole, or if they are gathered now.
    """
    found = FlatState({}, {}, ())
    handled: set[str] = set()
    for prefix, unit in _units(module):
        handle = unit._handle
        if handle is None:  # a unit without parameters of its own
            continue
        _check(handle, f"{path}.{prefix}" if prefix else path)
        for name, value in _fragments(handle):
            found.tensors[_below(prefix, name)] = value
            handled.add(_clean(_below(prefix, name)))
        if handle.uses_sharded_strategy and _has_run(handle):
            found = found._replace(release=(*found.release, handle._free_unsharded_flat_param))
    for prefix, part in module.named_modules(remove_duplicate=False):
        for name, value in (*part._parameters.items(), *part._buffers.items()):
            own = _below(prefix, name)
            kept = value is not None and name != "_flat_param" and name not in part._non_persistent_buffers_set
            if kept and _clean(own) not in handled:
                found.tensors[own] = value
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            found.extras[_below(prefix, EXTRA_STATE)] = part, part.get_extra_state()
    return found


def _units(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((prefix, child) for prefix, child in module.named_modules() if type(child).__name__ == WRAPPER)


def _check(handle: Any, path: str) -> None:
    if not handle._use_orig_params:
        raise InvalidRequest(
            f"{path}: this FullyShardedDataParallel gives the optimizer flat parameters, which have no single name",
            hint="wrap with use_orig_params=True, or shard with torch.distributed.fsdp.fully_shard (FSDP2)",
        )
    if handle.uses_sharded_strategy and not handle.is_sharded(handle.flat_param):
        raise InvalidRequest(
            f"{path}: the parameters of this FullyShardedDataParallel are gathered (unsharded) at the moment",
            hint="save and restore outside forward, backward and summon_full_params",
        )


def _fragments(handle: Any) -> Iterator[tuple[str, Storable]]:
    """The names below the unit, and this rank's part of each; a shared parameter is one value under all its names."""
    flat = handle.flat_param
    if not handle.uses_sharded_strategy:  # NO_SHARD: every rank has all parameters
        values: list[Storable] = list(flat._params)
    else:
        shards = zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)
        local = flat._local_shard if _has_run(handle) else flat
        values = [_fragment(local, *shard) for shard in shards]
    by_name = dict(zip(flat._fqns, values, strict=True))
    yield from by_name.items()
    for shared in flat._shared_param_infos:
        first = _below(shared.prim_module_name, shared.prim_param_name)
        yield _below(shared.module_name, shared.param_name), by_name[first]


def _fragment(shard: torch.Tensor, parameter: torch.Tensor, shape: torch.Size, info: Any) -> Fragment:
    low, count = (info.offset_in_shard, info.numel_in_shard) if info.in_shard else (0, 0)
    first = info.intra_param_start_idx if info.in_shard else 0
    return Fragment(shard.detach()[low : low + count], shape, flat=(first, first + count), held=parameter)


def _has_run(handle: Any) -> bool:
    """Whether there was a forward pass: the first makes the attributes of a flat parameter. Until then it is the shard."""
    return hasattr(handle.flat_param, "_local_shard")


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")

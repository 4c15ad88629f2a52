"""What an entry of the state is, by its key and value, and the named tensors that it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.state import extras, optimizer_wrappers, optimizers, rng, streams
from holdfast.state.given import Given
from holdfast.state.modules import (
    EMA,
    MODEL,
    ModuleState,
    NamedTensors,
    is_tensor,
    is_tensors,
    mapping_state,
    module_state,
)
from holdfast.state.named import Named, modules_of
from holdfast.tensors.fragments import fragment_list
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest

MASTER, EXTRA = optimizers.MASTER_GROUP, extras.GROUP
GROUP_ORDER = (MODEL, MASTER, optimizers.GROUP, EMA, EXTRA)
_RESERVED_KEYS = frozenset({rng.KEY, "ranks"})  # names of the group `extra` that are reserved


def check_key(key: object) -> None:
    if not isinstance(key, str) or not key or "/" in key or key.startswith("$"):
        raise InvalidRequest(
            f"the state's key {key!r} is not allowed", hint="use text without '/' that does not begin with '$'"
        )
    if key in _RESERVED_KEYS:
        raise InvalidRequest(
            f"the state's key {key!r} is reserved", hint="random states are saved automatically under this key"
        )


def is_loose(key: str, value: object) -> bool:
    named = bool(modules_of(value)) or is_tensor(value) or is_tensors(value) or _is_group_mapping(key, value)
    return not (named or isinstance(value, Given) or optimizer_wrappers.is_optimizer(value))


def is_value(key: str, value: object) -> bool:
    return is_loose(key, value) and streams.stateful(key, value) is None


def _is_group_mapping(key: str, value: object) -> bool:
    """Whether an entry's key makes it a group of its own, even if it has no tensor."""
    return key in (MODEL, MASTER, EMA) and isinstance(value, Mapping) and (not value or is_tensors(value))


def module_groups(state: Mapping[str, Any]) -> dict[str, str]:
    """Key -> group of every module."""
    modules = [k for k, v in state.items() if modules_of(v) and k != EMA and not isinstance(v, AveragedModel)]
    averages = [k for k, v in state.items() if k == EMA or isinstance(v, AveragedModel)]
    if len(averages) > 1:
        raise InvalidRequest(
            f"{' and '.join(averages)} would both be saved as the group {EMA!r}", hint="keep one, or make one a mapping"
        )
    groups = {key: EMA for key in averages}
    for key in modules:
        only = len(modules) == 1 and MODEL not in state and not isinstance(state[key], Named)
        group = MODEL if key == MODEL or only else naming.check_group(key)
        if key in GROUP_ORDER and key != MODEL:
            raise InvalidRequest(f"a module cannot have the key {key!r}: it is a reserved group name")
        groups[key] = group
    return groups


def named_tensors(key: str, value: Any, modules: Mapping[str, str], rank: int) -> NamedTensors | None:
    if isinstance(value, nn.Module | Named):
        found = value.state(key) if isinstance(value, Named) else module_state(value, key)
        return NamedTensors(modules[key], key, found, "", rank)
    if _is_group_mapping(key, value):
        return NamedTensors(key, key, mapping_state(value, key), "", rank)
    if is_tensor(value):
        return NamedTensors(EXTRA, key, ModuleState({"": fragment_list(value, key) or value}, {}), key, rank)
    if is_tensors(value):
        return NamedTensors(EXTRA, key, mapping_state(value, key), f"{key}/", rank)
    return None

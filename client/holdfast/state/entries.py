"""The kind of an entry of the state, by its key and value, and its named tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.left_out import LeftOutNote
from holdfast.state import extras, loaders, optimizer_wrappers, rng, state_tensors, streams
from holdfast.state.containers import ContainerKeeper
from holdfast.state.extras import Stateful, Value
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
from holdfast.state.named_entries import NamedSnapshot
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.state.untracked import schedules, unsaved
from holdfast.tensors.fragments import fragment_list
from holdfast.tensors.leaves import Content, OfferedLeaves, PartPlan, Selection
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest

MASTER, EXTRA = state_tensors.MASTER_GROUP, extras.GROUP
GROUP_ORDER = (MODEL, MASTER, state_tensors.GROUP, EMA, EXTRA)
_RESERVED_KEYS = frozenset({rng.KEY, "ranks", unsaved.KEY})  # names of the group `extra` that are reserved


class StatePart(Protocol):
    """An entry of the state, which can list its contents."""

    @property
    def groups(self) -> frozenset[str]: ...
    def collect(self, content: Content) -> None: ...


class AskedEntry(StatePart, Protocol):
    """An entry that is read again at every save, and declares what it wants from a checkpoint."""

    def plan(self, stored: OfferedLeaves, selection: Selection) -> PartPlan: ...


def check_key(key: object) -> None:
    if not isinstance(key, str) or not key or "/" in key or key.startswith("$"):
        raise InvalidRequest(
            f"the state's key {key!r} is not allowed", hint="use text without '/' that does not begin with '$'"
        )
    if key in _RESERVED_KEYS:
        raise InvalidRequest(
            f"the state's key {key!r} is reserved",
            hint="Holdfast stores its own entries under it: use another key",
        )


def is_loose(key: str, value: object) -> bool:
    named = bool(modules_of(value)) or is_tensor(value) or is_tensors(value) or _is_group_mapping(key, value)
    known = isinstance(value, NamedSnapshot | streams.FurtherStreams)
    return not (named or known or optimizer_wrappers.is_optimizer(value))


def loose(state: Mapping[str, Any], rank: int, keeper: ContainerKeeper) -> list[AskedEntry]:
    """Entries of the group `extra` in the order of restoring: objects and values, then the iterators of loaders, then the
    generators that these have drawn from.
    """
    entries_now: list[AskedEntry] = []
    generators: list[AskedEntry] = []
    iterated: dict[str, Any] = {}
    for key, value in state.items():
        if not is_loose(key, value):
            continue
        target = streams.stateful(key, value)
        if target is None:
            entries_now.append(Value(key, state, keeper))
            continue
        if loaders.is_loader(target):
            iterated[key] = target
            own = loaders.own_generator(key, target, state, rank)
            generators += [] if own is None else [own]
            entries_now += [loaders.LoaderRows(key, target), Stateful(key, loaders.HeldLoader(key, target), rank)]
        else:
            (generators if isinstance(target, streams.HeldStreams) else entries_now).append(Stateful(key, target, rank))
    return [*entries_now, loaders.LoaderIterators(iterated), *generators]


def notes_of(state: Mapping[str, Any]) -> list[LeftOutNote]:
    """Notes on what a save of these entries leaves out: samplers' orders, schedules, and what adapters name."""
    asked = {key: value for key, value in state.items() if not isinstance(value, Mapping)}  # which may have many tensors
    notes = [loaders.note_of(key, value) for key, value in asked.items() if is_loose(key, value)]
    named = (value.left_out(key) for key, value in asked.items() if isinstance(value, streams.IncompleteEntry))
    told = (text for value in asked.values() if isinstance(value, OptimizerShards) for text in value.left_out())
    notes += [LeftOutNote(text) for text in (*named, *dict.fromkeys(told)) if text is not None]
    given = any(isinstance(value, NamedSnapshot) for value in state.values())  # its adapter knows what else it saves
    return [*(note for note in notes if note is not None), *(() if given else schedules.notes_of(state))]


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
            raise InvalidRequest(
                f"a module cannot have the key {key!r}: it is a reserved group name", hint="use another key, such as 'model'"
            )
        groups[key] = group
    return groups


def views(state: Mapping[str, Any]) -> frozenset[str]:
    """The keys of entries of adapters, whose tensors are other objects when they have another memory or form."""
    return frozenset(
        key
        for key, value in state.items()
        if (isinstance(value, Named) and value.views) or (isinstance(value, OptimizerShards) and value.unchanged is not None)
    )


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

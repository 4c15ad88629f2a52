"""Hyper-parameters of optimizers and schedulers on a restore: which are taken from the checkpoint, which stay, and which
user values that replaces.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from holdfast.left_out import LeftOutNote
from holdfast.tensors.leaves import PartPlan, Selection
from holdfast.tensors.optimizer_documents import BEGAN
from holdfast_formats.errors import InvalidRequest, StateMismatch

Hyper = Mapping[str, Any]
LISTED_MAX = 20
# They say how a step is computed, not what was trained: the live optimizer keeps its own.
IMPLEMENTATION = frozenset(
    {
        "params",
        "param_names",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "is_expert_parallel",  # Megatron's: whether this layout divides the group's experts among ranks
    }
)
# A schedule moves these. Where it has noted what it began with, that is what the user gave.
_MOVED = {
    "lr": ("initial_lr",),
    "momentum": ("base_momentum", "max_momentum"),
    "betas": ("base_momentum", "max_momentum"),
}
_OF_SCHEDULES = frozenset({"max_lr"})  # given to a scheduler, which keeps them in the groups of its optimizer
_UNUSED = ("l1_decay", "l2_decay")  # of Paddle's optimizers; torch's would not read them
_INNER = "_schedulers"  # of torch's schedulers that are made of others
# Which torch's schedulers compute from what they were given, and the setting with which it goes: OneCycleLR, CyclicLR.
_COMPUTED = {"_schedule_phases": "total_steps", "total_size": "total_size", "step_ratio": "step_ratio"}


class FirstRates:
    """The first learning rate seen of each parameter group: the one that the user set."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[Hyper, Any]] = {}  # the group (kept alive), and its rate

    def look(self, groups: Iterable[Hyper]) -> None:
        for group in groups:
            self._first.setdefault(id(group), (group, group.get("lr")))

    def moved(self, group: Hyper) -> float | None:
        """A group's initial rate, if it is a number, has changed, and no scheduler has recorded it."""
        first = self._first.get(id(group), (group, None))[1]
        plain = isinstance(first, float | int) and "initial_lr" not in group
        return first if plain and not _equal(_number(group.get("lr")), first) else None


class LiveGroups(NamedTuple):
    """The parameter groups of an optimizer: its key in the state, the parameters of each by name, the hyper-parameters of
    each, and the names of those that the user sets; others are internal counters.
    """

    key: str
    names: Sequence[Sequence[str]]
    hyper: Sequence[Hyper]
    given: frozenset[str]


def given_to(optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[str]:
    """The constructor arguments of these optimizers."""
    kinds = {kind for one in optimizers for kind in type(one).__mro__ if issubclass(kind, torch.optim.Optimizer)}
    return frozenset(name for kind in kinds for name in inspect.signature(kind).parameters)


def check_keep(patterns: Sequence[str], live: Iterable[tuple[str, Iterable[Hyper]]]) -> None:
    """`InvalidRequest` for a pattern of `keep=` that matches nothing; `live` are the groups by the optimizer's key, and the
    settings of schedulers by theirs.
    """
    known = {f"{key}/{name}" for key, groups in live for group in groups for name in group if name not in IMPLEMENTATION}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise InvalidRequest(
                f"keep= matches no hyper-parameter of the state's optimizers and schedulers: {pattern}",
                hint=f"there are {', '.join(sorted(known)) or 'none'}",
            )


def chosen(of: LiveGroups, document: Mapping[str, Any], plan: PartPlan, selection: Selection) -> list[dict[str, Any]]:
    """For each live group, the hyper-parameters of its parameters' stored group, without kept ones.

    The plan gets a conflict if these were saved in groups that differ.
    """
    by_name = {name: group for group in document["groups"].values() for name in group["params"]}
    began = {name: lr for name, lr in document.get(BEGAN, {}).items() if name in by_name}
    chosen_values, replaced, unlike = [], list[str](), list[str]()
    for position, (names, live) in enumerate(zip(of.names, of.hyper, strict=True)):
        where = f"{of.key}.param_groups[{position}]"
        groups = {id(by_name[name]): by_name[name] for name in names if name in by_name}.values()
        hypers = [_taken(of.key, group, selection) for group in groups]
        if not live.keys() - IMPLEMENTATION:  # those of other ranks, whose groups take them
            chosen_values.append(hypers[0] if len(hypers) == 1 else {})
            continue
        if not hypers and names:
            text = f"{where}: none of its parameters is in the checkpoint, so its hyper-parameters are unchanged"
            plan.notes.append(LeftOutNote(text))
        if differing := sorted({name for hyper in hypers for name in _differing(hyper, hypers[0])}):
            plan.conflicts.append(f"{where}: its parameters were saved in groups that differ in {_shown(hypers, differing)}")
            plan.keepable += [f"{of.key}/{name}" for name in differing]
        chosen_values.append(hypers[0] if hypers else {})
        firsts = {by_name[name]["params"][0] for name in names if name in by_name}
        by_hand = next((began[name] for name in firsts if name in began), None)
        replaced += [f"{text} of {where}" for text in _replaced(live, chosen_values[-1], of.given, by_hand)]
        whole = next(iter(groups), None)
        unlike += [f"{text} in {where}" for text in _unlike(of, live, whole, selection)]
    if unlike:
        text = f"the checkpoint has other hyper-parameters than the optimizer: {'; '.join(unlike[:LISTED_MAX])}"
        plan.notes.append(LeftOutNote(text))
    if replaced:
        more = ", …" * (len(replaced) > LISTED_MAX)
        text = f"hyper-parameters of the checkpoint replace those given here: {'; '.join(replaced[:LISTED_MAX])}{more}"
        plan.notes.append(LeftOutNote(f"{text} (keep=('{of.key}/{replaced[0].partition(' ')[0]}',) would keep those given)"))
    return chosen_values


class SchedulerSetting(NamedTuple):
    """A value in a scheduler's `state_dict` that follows from its constructor's arguments: its name, where it is, and the
    name of the setting with which it is kept.
    """

    name: str
    held: dict[str, Any]
    key: str
    kept_with: str

    @property
    def value(self) -> Any:
        return self.held[self.key]


def settings(scheduler: LRScheduler, held: Any, prefix: str = "") -> Iterator[SchedulerSetting]:
    """The settings in `held`, a `state_dict` of such a scheduler. Those of schedulers inside it are called `0.T_max`.

    A class of the user may have a `state_dict` of another form, which has none.
    """
    if not isinstance(held, dict) or not all(isinstance(key, str) for key in held):
        return
    given = set(inspect.signature(type(scheduler).__init__).parameters) - {"last_epoch"}  # which every step moves
    given |= {"lr_lambdas", *_COMPUTED}
    for key in held:
        name = key.lstrip("_")
        if key != _INNER and not given.isdisjoint((key, name, name.removesuffix("s"))):
            yield SchedulerSetting(prefix + name, held, key, prefix + _COMPUTED.get(key, name))
    inside = held.get(_INNER)
    parts = zip(vars(scheduler).get(_INNER, ()), inside if isinstance(inside, list) else (), strict=False)
    for number, (inner, part) in enumerate(parts):
        yield from settings(inner, part, f"{prefix}{number}.")


def scheduler_settings(state: Mapping[str, Any]) -> list[tuple[str, list[Hyper]]]:
    """The settings of the state's schedulers, by the key of each."""
    schedulers = {key: value for key, value in state.items() if isinstance(value, LRScheduler)}
    return [
        (key, [{one.name: one.value for one in settings(value, value.state_dict())}]) for key, value in schedulers.items()
    ]


def refuse_unlike(key: str, scheduler: LRScheduler, stored: Any) -> None:
    """`StateMismatch` for the state of another program's scheduler, which torch would take without a word."""
    live = scheduler.state_dict()
    if stored and isinstance(stored, dict) and isinstance(live, dict) and live and live.keys().isdisjoint(stored):
        raise StateMismatch(
            f"extra/{key} is the state of another kind of scheduler: it has {', '.join(map(str, sorted(stored, key=str)))}, "
            f"and {type(scheduler).__name__} has none of that",
            hint=f"restore(exclude=('extra/{key}',)) begins the schedule at its start",
            key=f"extra/{key}",
        )


def keep_settings(key: str, scheduler: LRScheduler, stored: Any, selection: Selection) -> LeftOutNote | None:
    """Put the live settings that stay into a stored `state_dict`. Returns a note on those that the checkpoint replaces."""
    live = {one.name: one.value for one in settings(scheduler, scheduler.state_dict())}
    differing = [one for one in settings(scheduler, stored) if one.name in live and not _equal(live[one.name], one.value)]
    replaced: list[SchedulerSetting] = []
    for one in differing:
        if is_kept(key, one.kept_with, selection) or is_kept(key, one.name, selection):
            one.held[one.key] = live[one.name]
        elif one.name == one.kept_with or all(other.name != one.kept_with for other in differing):
            replaced.append(one)
    if not replaced:
        return None
    changes = "; ".join(f"{one.name} {live[one.name]} by {one.value} of {key}" for one in replaced[:LISTED_MAX])
    hint = f"keep=('{key}/{replaced[0].name}',) would keep those given"
    return LeftOutNote(f"settings of the checkpoint's scheduler replace those given here: {changes} ({hint})")


def is_kept(key: str, name: str, selection: Selection) -> bool:
    return any(fnmatchcase(f"{key}/{name}", pattern) for pattern in selection.keep)


def _taken(key: str, group: Hyper, selection: Selection) -> dict[str, Any]:
    return {name: v for name, v in group.items() if name not in IMPLEMENTATION and not is_kept(key, name, selection)}


def _differing(a: Hyper, b: Hyper) -> list[str]:
    # Tensors among them are not filled yet at this point; numbers and text decide.
    return [name for name in {**a, **b} if not _same(a.get(name), b.get(name))]


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor) or repr(a) == repr(b)


def _shown(hypers: Sequence[Hyper], names: Sequence[str]) -> str:
    return "; ".join(f"{name} ({', '.join(dict.fromkeys(str(hyper.get(name)) for hyper in hypers))})" for name in names)


def _replaced(live: Hyper, stored: Hyper, given: frozenset[str], began_by_hand: float | None) -> list[str]:
    """User values that the checkpoint replaces. A value that a scheduler or the user's loop has changed since is compared as
    it began.
    """
    changes = []
    for name in sorted((given | _OF_SCHEDULES) & live.keys() & stored.keys()):
        now, then = live[name], stored[name]
        began = [kept for kept in _MOVED.get(name, ()) if kept in stored]
        if name == "lr" and began:
            now, then = live.get("initial_lr", now), stored["initial_lr"]
        elif began:
            continue
        elif name == "lr" and began_by_hand is not None:
            then = began_by_hand
        now = _number(now)
        if not isinstance(then, torch.Tensor) and not _equal(now, then):
            changes.append(f"{name} {now} by {then}")
    return changes


def _unlike(of: LiveGroups, live: Hyper, stored: Hyper | None, selection: Selection) -> list[str]:
    """What has no effect of a stored group, and the user's numbers of the live one that no stored one replaces: they are of
    another kind of optimizer.
    """
    if stored is None:
        return []
    unused = [f"{name} {stored[name]} has no effect" for name in _UNUSED if stored.get(name) and name not in live]
    own = sorted(of.given & live.keys() - stored.keys() - IMPLEMENTATION)
    stays = [name for name in own if _is_set(live[name]) and not is_kept(of.key, name, selection)]
    return unused + [f"{name} {live[name]} stays, as the checkpoint has none" for name in stays]


def _is_set(value: Any) -> bool:
    return any(map(_is_set, value)) if isinstance(value, tuple) else type(value) in (int, float) and bool(value)


def _number(value: Any) -> Any:
    """The number that a tensor of one element was made of: 0.1, where the nearest 32-bit number is 0.10000000149."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return value
    return float(str(np.float32(value.item()))) if value.dtype is torch.float32 else value.item()


def _equal(now: Any, then: Any) -> bool:
    if isinstance(now, list | tuple) and isinstance(then, list | tuple):
        return len(now) == len(then) and all(map(_equal, now, then))
    return _same(now, then) or (isinstance(now, int | float) and isinstance(then, int | float) and now == then)

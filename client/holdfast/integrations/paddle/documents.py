"""Paddle's learning-rate schedulers and loss scaler as entries of a state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.state.streams import CheckedEntry, IncompleteEntry
from holdfast_formats.errors import StateMismatch

_LEFT_OUT = ("T_cur", "T_i")  # what CosineAnnealingWarmRestarts counts, and Paddle's own state_dict() lacks
_COUNTERS = (bool, int, float, str, type(None))
_NAMELESS = ("_var_name",)  # a name that Paddle gives it


class Scheduler(IncompleteEntry):
    """A scheduler of paddle.optimizer.lr, with the one inside it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._first = [(one, _unsaved(one)) for one in _with_inner(scheduler)]

    def left_out(self, key: str) -> str | None:
        """Name the plain attributes that have changed, and that the state_dict() of the user's class lacks."""
        changed = {name for one, first in self._first for name, _ in _unsaved(one).items() - first.items()}
        if not changed:
            return None
        return (
            f"not saved: attributes of {key} that have changed: {', '.join(sorted(changed))}; list them in state_keys() of "
            f"{type(self.scheduler).__name__}: self.keys = ['last_epoch', 'last_lr', {min(changed)!r}]"
        )

    def state_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = self.scheduler.state_dict()
        return {**document, **_left_out(self.scheduler)}

    def refuse_unfit(self, stored: Any) -> None:
        """Raise `StateMismatch` for the document of another kind of scheduler."""
        _refuse_unfit(type(self.scheduler).__name__, stored, self.state_dict())

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        more = _left_out(self.scheduler)
        self.scheduler.set_state_dict({key: value for key, value in stored.items() if key not in more})
        for owner in _with_inner(self.scheduler):
            vars(owner).update({name: stored[name] for name in _LEFT_OUT if name in vars(owner)})


def _with_inner(scheduler: Any) -> Iterator[Any]:
    """A scheduler, and the one that a LinearWarmup goes over to."""
    from paddle.optimizer.lr import LRScheduler

    yield scheduler
    for held in vars(scheduler).values():
        if isinstance(held, LRScheduler):
            yield from _with_inner(held)


def _left_out(scheduler: Any) -> dict[str, Any]:
    return {name: vars(one)[name] for one in _with_inner(scheduler) for name in _LEFT_OUT if name in vars(one)}


def _unsaved(scheduler: Any) -> dict[str, str]:
    """The plain attributes that are not saved, by their `repr`, in which NaN equals itself."""
    saved = {*scheduler.state_dict(), *_LEFT_OUT, *_NAMELESS}
    return {name: repr(one) for name, one in vars(scheduler).items() if type(one) in _COUNTERS and name not in saved}


class Scaler(CheckedEntry):
    """A paddle.amp.GradScaler. A disabled one has no state; in a bfloat16 training it disables itself at its first use."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        document: dict[str, Any] = self.scaler.state_dict()
        return document

    def refuse_unfit(self, stored: Any) -> None:
        """Raise `StateMismatch` for a document of something else, and for a loss scale where this scaler is disabled."""
        if stored != {}:
            _refuse_unfit(type(self.scaler).__name__, stored, self.state_dict())

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        if stored:
            self.scaler.load_state_dict(stored)


def _refuse_unfit(kind: str, stored: Any, live: dict[str, Any]) -> None:
    if not isinstance(stored, dict) or stored.keys() != live.keys():
        names = sorted(stored.keys() ^ live.keys()) if isinstance(stored, dict) else []
        raise StateMismatch(
            f"the checkpoint has the state of something else than this {kind}: only one of them has "
            f"{', '.join(names) or 'names'}",
            hint="construct it as the one that was saved, or leave it out with exclude=",
        )

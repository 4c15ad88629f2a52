"""What a Trainer's callbacks keep: stored, as transformers does, or named in a warning.

A callback with `state_dict()` and `load_state_dict()` says itself what it keeps, as JSON values. Of EarlyStoppingCallback it
is the count of evaluations without an improvement.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

log = logging.getLogger(__name__)

_COUNTER = "early_stopping_patience_counter"
_OF_LIBRARIES = ("paddleformers.", "paddlenlp.", "holdfast.")
_PLAIN = (int, float, str, type(None))


class CallbackStates:
    """An entry of the state: what callbacks keep, by the names of their classes."""

    only_ours = True  # Paddle's own checkpoints have none

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for one in self._callbacks:
            if _keeps(one):
                found[type(one).__name__] = one.state_dict()
            elif hasattr(one, _COUNTER):
                found[type(one).__name__] = {_COUNTER: int(getattr(one, _COUNTER))}
        return found

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Give each callback its state back, and warn of states for which there is none."""
        by_name = {type(one).__name__: one for one in self._callbacks}
        for name, state in stored.items():
            one = by_name.get(name)
            if one is None:
                log.warning("the checkpoint has the state of a %s, and this Trainer has none", name)
            elif _keeps(one):
                one.load_state_dict(state)
            elif hasattr(one, _COUNTER):
                setattr(one, _COUNTER, state[_COUNTER])


class CallbackWatch:
    """Finds values of callbacks that change during a training, and that nothing stores. Each is named once."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._watched = [one for one in callbacks if not _keeps(one) and not type(one).__module__.startswith(_OF_LIBRARIES)]
        self._began = [_values(one) for one in self._watched]
        self._named: set[int] = set()

    def look(self) -> None:
        for one, began in zip(self._watched, self._began, strict=True):
            changed = sorted(name for name, value in _values(one).items() if began.get(name, value) != value)
            if changed and id(one) not in self._named:
                self._named.add(id(one))
                log.warning(
                    "%s.%s changes and is not saved, so a start from a checkpoint has its first value: give the callback "
                    "state_dict() and load_state_dict()",
                    type(one).__name__,
                    changed[0],
                )


def _keeps(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None)) and callable(getattr(callback, "load_state_dict", None))


def _values(callback: Any) -> dict[str, Any]:
    return {name: value for name, value in getattr(callback, "__dict__", {}).items() if isinstance(value, _PLAIN)}

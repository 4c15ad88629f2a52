"""Completes pending saves before the process ends, even if no checkpointer was closed, and ends the client's threads."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from holdfast.save_warning import warn
from holdfast.threads import own_threads

EXIT_WAIT_S = 60.0  # for one save without progress: a daemon that does not answer must not keep the process from ending

_unfinished: dict[int, Unfinished] = {}
_tickets: weakref.WeakSet[FailureSource] = weakref.WeakSet()


class Unfinished(Protocol):
    """A pending save; `str()` names it."""

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the daemon has it or it has failed; False if it made no progress for `timeout` seconds."""


class FailedSave(Protocol):
    @property
    def run(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def error(self) -> Exception | None: ...


class FailureSource(Protocol):
    """A source of failed saves, each reported once."""

    def take_failure(self) -> FailedSave | None:
        """Return the oldest failed save that was not reported yet."""


def see_through(save: Unfinished) -> None:
    _unfinished[id(save)] = save


def forget(save: Unfinished) -> None:
    _unfinished.pop(id(save), None)


def report_failures_of(tickets: FailureSource) -> None:
    """At exit, report failures of this source that were not reported yet."""
    _tickets.add(tickets)


@atexit.register
def _end() -> None:
    """Run at the end, while threads still run: after an exception and sys.exit(), but not after os._exit() or a fatal
    signal.
    """
    ends: dict[str, str] = {}
    while (save := _next_unfinished()) is not None:  # sealed saves are sent after that, to a daemon on another machine
        done = save.join(EXIT_WAIT_S)
        ends[str(save)] = "was completed before exit" if done else f"made no progress for {EXIT_WAIT_S:.0f} s and is lost"
    failed_saves: list[str] = []
    for tickets in list(_tickets):
        while (failed := tickets.take_failure()) is not None:
            ends.pop(f"{failed.run}@{failed.step}", None)
            failed_saves.append(f"the save of {failed.run}@{failed.step} failed: {failed.error}")
    open_saves = [
        f"the process exits without close(): the save of {save} was still in progress and {end}"
        for save, end in ends.items()
    ]
    try:
        for text in open_saves + failed_saves:
            warn(text)
    finally:  # a warning may be an error
        own_threads.end()


def _next_unfinished() -> Unfinished | None:
    """Pop one save in a single step of Python, because other threads add and remove saves meanwhile."""
    try:
        return _unfinished.popitem()[1]
    except KeyError:
        return None


def _forget_all() -> None:
    _unfinished.clear()
    _tickets.clear()


os.register_at_fork(after_in_child=_forget_all)  # the threads that would complete them stay with the parent

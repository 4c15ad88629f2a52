"""What a process sees through before it ends, though nobody closed its checkpointers: saves on their way to the daemon."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from holdfast.save_warning import warn

EXIT_WAIT_S = 60.0  # for one save that gets no further: a daemon that does not answer any more keeps no process from ending

_unfinished: dict[int, Unfinished] = {}
_tickets: weakref.WeakSet[Told] = weakref.WeakSet()


class Unfinished(Protocol):
    """A save on its way to the daemon. Its text says which."""

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the daemon has it, or it has failed; False when it got no further for `timeout` seconds."""


class FailedSave(Protocol):
    """A save that failed."""

    @property
    def run(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def error(self) -> Exception | None: ...


class Told(Protocol):
    """Who tells of failed saves, each once."""

    def take_failure(self) -> FailedSave | None:
        """The oldest one that has not been told of."""


def see_through(save: Unfinished) -> None:
    """This process does not end before the save is the daemon's."""
    _unfinished[id(save)] = save


def forget(save: Unfinished) -> None:
    """It is, or it has failed."""
    _unfinished.pop(id(save), None)


def tell_failures_of(tickets: Told) -> None:
    """What nobody was told of when the process ends, it is told of then."""
    _tickets.add(tickets)


@atexit.register
def _end() -> None:
    """Runs while threads go on, after an exception and after sys.exit() too; not after os._exit() or a signal that kills."""
    ends: dict[str, str] = {}
    while (save := _next_unfinished()) is not None:  # sealed saves go out after that, to a daemon on another machine
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
    for text in open_saves + failed_saves:
        warn(text)


def _next_unfinished() -> Unfinished | None:
    """Other threads hand saves over and end them meanwhile: taking one is a single step."""
    try:
        return _unfinished.popitem()[1]
    except KeyError:
        return None


def _forget_all() -> None:
    _unfinished.clear()
    _tickets.clear()


os.register_at_fork(after_in_child=_forget_all)  # the threads that would see them through stay with the parent

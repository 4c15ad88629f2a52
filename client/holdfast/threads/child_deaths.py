"""Delays the handler of SIGCHLD while a checkpointer works: torch's DataLoader installs one that raises in the main
thread.

It raises wherever the main thread is when a worker dies. A signal to the whole process group kills workers while the
trainer saves, and would end the save half-way.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


class Delay:
    """Replaces the handler, and records whether the signal came."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._came = False
        self._raised: RuntimeError | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._came = True

    def begin(self) -> None:
        try:
            signal.signal(signal.SIGCHLD, self)
        except RuntimeError as error:  # of a worker that had died before: its handler runs when another is to be set
            self._raised = error
            signal.signal(signal.SIGCHLD, self)

    def end(self) -> None:
        """Restore the handler, and run it if the signal came; raises what it raises."""
        present: object = signal.getsignal(signal.SIGCHLD)
        if present is self:
            signal.signal(signal.SIGCHLD, self._handler)
        if self._came:
            self._handler(signal.SIGCHLD, None)
        if self._raised is not None:
            raise self._raised

    def forget(self) -> None:
        """As `end`, but only log what the handler raises, because the cause of the workers' death is known."""
        try:
            self.end()
        except RuntimeError as error:
            log.info("after the signal that ended the training: %s", error)


def delay() -> Delay | None:
    """Delay the handler from now on. None if there is none, if it is delayed already, and outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or isinstance(handler, Delay):
        return None
    begun = Delay(handler)
    begun.begin()
    return begun


@contextmanager
def delayed() -> Iterator[None]:
    begun = delay()
    try:
        yield
    finally:
        if begun is not None:
            begun.end()

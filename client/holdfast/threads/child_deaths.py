"""Delays the handler of SIGCHLD while a checkpointer works: torch's DataLoader installs one that raises in the main thread.

It does so when a worker dies, wherever the main thread is. A signal to the whole process group kills workers while the
trainer saves, and the save would end half-way.
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
    """Stands in for the handler, and notes whether the signal came."""

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
        """Put the handler back, and run it if the signal came; what it raises is raised here."""
        present: object = signal.getsignal(signal.SIGCHLD)
        if present is self:
            signal.signal(signal.SIGCHLD, self._handler)
        if self._came:
            self._handler(signal.SIGCHLD, None)
        if self._raised is not None:
            raise self._raised

    def forget(self) -> None:
        """As `end`, where it is known why workers died: what the handler raises is only logged."""
        try:
            self.end()
        except RuntimeError as error:
            log.info("after the signal that ended the training: %s", error)


def delay() -> Delay | None:
    """Delay the handler from now on. None if there is none, if it is delayed already, and in other threads than the main
    one, which no handler interrupts.
    """
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
    """Within this block the handler does not run; it runs at its end if the signal came."""
    begun = delay()
    try:
        yield
    finally:
        if begun is not None:
            begun.end()

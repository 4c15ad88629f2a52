"""An event that may be set and waited for whatever the thread was doing when a signal interrupted it."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress


class Latch:
    """Set once, for good.

    `threading.Event` holds a lock while it runs Python. A signal handler that waits for the same event in the thread that it
    interrupted there would wait for itself. Here every waiter has a lock of its own, and what is shared changes in one step.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiting: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        with suppress(IndexError):
            while True:
                self._waiting.popleft().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is set, within `timeout` seconds."""
        if self._set:
            return True
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        if not self._set:  # else it was set before it saw us
            mine.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        with suppress(ValueError):
            self._waiting.remove(mine)
        return self._set

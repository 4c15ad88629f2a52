"""An event that can be set and waited for even if a signal interrupts its own thread."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress


class Latch:
    """An event that is set once, for good.

    `threading.Event` holds a lock while it runs Python. A signal handler that waits for the same event in the thread that it
    interrupted there would wait for itself. Here every waiter has a lock of its own, and shared data changes in one step of
    Python.
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
        """Wait until it is set; return whether it is, within `timeout` seconds."""
        if self._set:
            return True
        mine = threading.Lock()
        mine.acquire()
        self._waiting.append(mine)
        if not self._set:  # else it was set before this waiter was added
            mine.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        with suppress(ValueError):
            self._waiting.remove(mine)
        return self._set

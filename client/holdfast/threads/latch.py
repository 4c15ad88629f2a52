"""An event that can be set and waited for even if a signal interrupts its own thread."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress


class Latch:
    """An event that is set once, for good.

    `threading.Event` holds a lock while it runs Python, so a signal handler that waits for an event that its own thread
    was setting would deadlock. Here every waiter has its own lock, and shared data changes in one bytecode.
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

"""How often what may happen any number of times is told of: once a minute for each kind, and so many of all together.

Where things have an author, each author has a number of their own: nobody spends the others'.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from threading import Lock

TOLD_EVERY_S = 60.0  # of one key
KEYS_MAX = 1024
TOLD_A_MINUTE_MAX = 60  # of all keys of one author together


class Throttle:
    """Says of each thing that happened whether it is told of. Thread-safe, and bounded in memory."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._told: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()
        self._minutes: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def due(self, key: tuple[str, ...], author: str = "") -> int | None:
        """How many of this key nobody was told of; None when it is too early to tell of one more."""
        with self._lock:
            now = time.monotonic()
            at, untold = self._told.pop(key, (float("-inf"), 0))
            began, told = self._minutes.pop(author, (now, 0))
            began, told = (began, told) if now - began < 60 else (now, 0)
            due = now - at >= TOLD_EVERY_S and told < TOLD_A_MINUTE_MAX
            self._told[key] = (now, 0) if due else (at, untold + 1)
            self._minutes[author] = (began, told + due)
            if len(self._told) > KEYS_MAX:
                self._told.popitem(last=False)
            if len(self._minutes) > KEYS_MAX:
                self._minutes.popitem(last=False)
            return untold if due else None

    def forget(self) -> None:
        """As if nothing had been told yet."""
        with self._lock:
            self._told.clear()
            self._minutes.clear()

    def __len__(self) -> int:
        return len(self._told)

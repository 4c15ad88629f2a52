"""Verification gives way to ranks, which need the memory bandwidth, or the disk for the catalog, and stall training."""

from __future__ import annotations

import time
from collections.abc import Callable

ARRIVAL_S = 0.5  # from a rank's first word to its question what to restore
GIVE_WAY_MAX_S, GIVE_WAY_POLL_S = 0.5, 0.005  # for each piece that is read: a rank that hangs holds a check up, no more


class ReadThrottle:
    """Called before each piece that is read: returns when no rank is staging or restoring, or has just connected."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._came = -ARRIVAL_S  # when the last rank connected

    def expect(self) -> None:
        self._came = time.monotonic()

    def __call__(self, size: int) -> None:
        limit = time.monotonic() + GIVE_WAY_MAX_S
        while (self._busy() or self._arriving) and time.monotonic() < limit:
            time.sleep(GIVE_WAY_POLL_S)

    @property
    def _arriving(self) -> bool:
        return time.monotonic() < self._came + ARRIVAL_S

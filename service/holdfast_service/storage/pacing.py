"""Limits the speed of writing, so that other users of a shared disk or network get their part."""

from __future__ import annotations

import threading
import time


class Pace:
    """So many bytes a second, for all writers together. Unused time is not made up for later."""

    def __init__(self, bytes_per_second: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def take(self, count: int) -> None:
        """Return when `count` bytes may be written. Each caller waits for those before it."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_per_second
            wait_s = self._free_at - time.monotonic()
        time.sleep(max(wait_s, 0.0))

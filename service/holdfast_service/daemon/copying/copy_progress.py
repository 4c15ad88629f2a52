"""The progress of the copy that a replica's worker makes now, and its speed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest.replica_lags import RunningCopy
from holdfast_formats.timestamps import utc_now

WINDOW_S = 10.0  # over which the speed is taken
SAMPLE_S = 1.0


class _Sample(NamedTuple):
    at_s: float
    done: int


class CopyProgress:
    """Counts the bytes of one copy at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: CheckpointId | None = None
        self._started, self._done, self._total = "", 0, 0
        self._samples: deque[_Sample] = deque()  # of the window, and the last one before it

    @contextmanager
    def of(self, which: CheckpointId, size: int) -> Iterator[None]:
        """A checkpoint of `size` bytes is copied in this block, and read back."""
        with self._lock:
            self._of, self._started, self._done, self._total = which, utc_now(), 0, 2 * size
            self._samples = deque([_Sample(time.monotonic(), 0)])
        try:
            yield
        finally:
            with self._lock:
                self._of = None

    def moved(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._samples[-1].at_s >= SAMPLE_S if self._samples else False:
                self._samples.append(_Sample(now, self._done))
                self._forget(now)

    def now(self) -> RunningCopy | None:
        """None while nothing is copied."""
        with self._lock:
            if self._of is None:
                return None
            now = time.monotonic()
            self._forget(now)
            first = self._samples[0]
            speed = (self._done - first.done) / max(now - first.at_s, 1e-3)
            return RunningCopy(
                run=self._of.run,
                step=self._of.step,
                started=self._started,
                done_bytes=min(self._done, self._total),
                total_bytes=self._total,
                bytes_per_second=round(speed, 1),
            )

    def _forget(self, now: float) -> None:
        while len(self._samples) > 1 and self._samples[1].at_s <= now - WINDOW_S:
            self._samples.popleft()

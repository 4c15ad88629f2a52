"""Measures the disk's speed, as a reference for the speed of saves: a short write, raised by faster saves.

It runs only after a save of that size was committed and checked, so it never costs more than the saves; again after a day;
never while a save is being written, and it stops if one starts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from holdfast_formats.errors import CheckpointError
from holdfast_service.daemon.writing.priority import give_way

log = logging.getLogger(__name__)

PROBE_BYTES = 64 * 2**20
AGAIN_S = 86_400.0

# Gets a function that returns whether to stop; returns bytes per second, None if stopped.
Probe = Callable[[Callable[[], bool]], float | None]


class DiskThroughput:
    """Bytes per second, None while unknown. Thread-safe. Without a `probe` it is the speed of the fastest save."""

    def __init__(self, probe: Probe | None = None) -> None:
        self.probe = probe
        self.bytes_per_second: float | None = None
        self._writing = 0
        self._measured_at: float | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def writing(self, begins: bool) -> None:
        with self._lock:
            self._writing += 1 if begins else -1

    def wrote(self, count: int, seconds: float) -> None:
        """A save was written in so many seconds, so the disk is at least that fast."""
        if count >= PROBE_BYTES and seconds > 0:
            with self._lock:
                self.bytes_per_second = max(count / seconds, self.bytes_per_second or 0.0)

    def checked(self, count: int) -> None:
        """A save of so many bytes is committed and checked: start a measurement in the background, if it is due."""
        with self._lock:
            fresh = self._measured_at is not None and time.monotonic() - self._measured_at < AGAIN_S
            running = self._thread is not None and self._thread.is_alive()
            if self.probe is None or self._closed or count < PROBE_BYTES or fresh or running:
                return
            self._thread = threading.Thread(target=self._measure, args=(self.probe,), name="holdfast-disk", daemon=True)
            self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _busy(self) -> bool:
        return self._closed or self._writing > 0

    def _measure(self, probe: Probe) -> None:
        give_way()
        try:
            measured = probe(self._busy)
        except CheckpointError as error:
            log.info("cannot measure the disk's speed: %s", error.detail)
            measured = None
        if measured is not None:
            with self._lock:
                self._measured_at = time.monotonic()
                self.bytes_per_second = max(measured, self.bytes_per_second or 0.0)
            log.info("the disk writes %.0f MB/s", measured / 1e6)

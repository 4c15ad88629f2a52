"""Reports, while the daemon stops, what it waits for: in the log, and to the service manager."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable
from types import TracebackType

from holdfast_service.daemon.saving.saver import Unwritten
from holdfast_service.observe.service_manager import ServiceManager

log = logging.getLogger("holdfast_service")

LOOK_S = 5.0
EXTEND_S = 60.0  # asked for at each look, while bytes move
STILL_S = 120.0  # without a byte read or written; after that the manager's own limit ends the daemon


class StopReport:
    """Within the block, the daemon stops. A thread reports, and asks the manager for more time as long as bytes move."""

    def __init__(self, manager: ServiceManager, unwritten: Callable[[], Unwritten], look_s: float = LOOK_S) -> None:
        self._manager, self._unwritten, self._look_s = manager, unwritten, look_s
        self._began = self._moved_at = time.monotonic()
        self._moved = _moved()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-stop-report", daemon=True)

    def __enter__(self) -> None:
        left = self._unwritten()
        log.info("stopping: %s", left)
        self._manager.stopping(f"stopping: {left}")
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        log.info("stopped after %.1f s", time.monotonic() - self._began)

    def _run(self) -> None:
        while not self._ended.wait(self._look_s):
            moved, now = _moved(), time.monotonic()
            if moved != self._moved:
                self._moved, self._moved_at = moved, now
            left = self._unwritten()
            log.info("still stopping after %.0f s: %s", now - self._began, left)
            self._manager.stopping(f"stopping: {left}", EXTEND_S if now - self._moved_at < STILL_S else None)


def _moved() -> tuple[int, int]:
    """Blocks that this process has read and written: they change while it makes progress, whatever it works at."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_inblock, used.ru_oublock

"""Reports, while the daemon stops, what it waits for: in the log, and to the service manager. Ends what waits in vain."""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from types import TracebackType

from holdfast_files.objects.traffic import Traffic
from holdfast_formats.errors import StorageFailed, exit_status
from holdfast_service.daemon.saving.saver import Unwritten
from holdfast_service.observe import bucket_traffic
from holdfast_service.observe.service_manager import ServiceManager

log = logging.getLogger("holdfast_service")

LOOK_S = 5.0
EXTEND_S = 60.0  # asked for at each look, while bytes move
STILL_S = 120.0  # without a byte read or written, after that the manager's own limit ends the daemon; or without an answer


class StopReport:
    """Within the block, the daemon stops. A thread reports, and asks the manager for more time as long as bytes move.

    While the root's bucket is away, nothing that is staged can be written. The process ends then at once, as by a kill: its
    memory outlives it, and the next daemon writes it, whereas a save that fails is lost.
    """

    def __init__(
        self,
        manager: ServiceManager,
        unwritten: Callable[[], Unwritten],
        traffic: Traffic | None = None,
        look_s: float = LOOK_S,
    ) -> None:
        """`traffic` has the requests to the root's bucket."""
        self._manager, self._unwritten, self._traffic, self._look_s = manager, unwritten, traffic, look_s
        self._began = self._moved_at = time.monotonic()
        self._began_s = time.time()
        self._moved = self._progress()
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
            moved, now = self._progress(), time.monotonic()
            if moved != self._moved:
                self._moved, self._moved_at = moved, now
            left = self._unwritten()
            if self._away_s() > STILL_S:
                said = bucket_traffic.awaited(self._traffic).why
                log.error("%s: the daemon ends, and what it stages is left as by a kill, for the next one; %s", said, left)
                logging.shutdown()
                os._exit(exit_status(StorageFailed(said)))
            log.info("still stopping after %.0f s: %s", now - self._began, left)
            self._manager.stopping(f"stopping: {left}", EXTEND_S if now - self._moved_at < STILL_S else None)

    def _progress(self) -> tuple[float, ...]:
        """Blocks that this process has read and written, and when the bucket answered last: they change while it makes
        progress, whatever it works at.
        """
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_inblock, used.ru_oublock, 0.0 if self._traffic is None else self._traffic.answered_s

    def _away_s(self) -> float:
        """For how long the bucket has failed every request since the stop began."""
        if self._traffic is None:
            return 0.0
        answered_s = self._traffic.answered_s
        has_failed = any(one.last_s > answered_s for one in self._traffic.failing())
        return time.time() - max(answered_s, self._began_s) if has_failed else 0.0

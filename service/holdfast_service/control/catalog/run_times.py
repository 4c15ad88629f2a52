"""The time between the commits of a run, measured by daemons; all ages in retention are derived from it.

A clock may jump by years, and those of two nodes may be hours apart, so times of different clocks are never subtracted. Time
while no daemon is up is not measured and does not count.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_service.control.database.schema import CheckpointRow, RunRow


class RunTimes:
    """Of one catalog, for one daemon. Thread-safe."""

    def __init__(self, shared: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """With a `shared` catalog its database measures the time since another node has recorded a commit, capped by this
        node's uptime.
        """
        self._shared, self._clock = shared, clock
        self._began = clock()
        self._lock = threading.Lock()
        self._recorded: dict[str, float] = {}  # when the newest commit was recorded here, by `clock`

    def now(self, session: Session, row: RunRow) -> float:
        """The time of a commit that is recorded now, in seconds since the run's first one; `row` is locked."""
        newest = session.scalar(select(func.max(CheckpointRow.seen_s)).where(CheckpointRow.run == row.name))
        passed = self._passed(session, row)
        return 0.0 if newest is None else newest + passed

    def renamed(self, run: str, name: str) -> None:
        with self._lock:
            self._recorded[name] = self._recorded.pop(run, self._began)

    def _passed(self, session: Session, row: RunRow) -> float:
        """Since the last commit of the run was recorded, as measured by this daemon."""
        now = self._clock()
        with self._lock:
            since = self._recorded.get(row.name, self._began)
            self._recorded[row.name] = now
        if not self._shared:
            return now - since
        before, row.recorded = row.recorded, session.scalar(select(func.clock_timestamp()))
        if before is None or row.recorded is None:
            return 0.0
        passed: float = (row.recorded - before).total_seconds()
        return min(max(passed, 0.0), now - self._began)

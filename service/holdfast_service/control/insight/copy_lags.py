"""How far the replicas of a root are behind, by what the catalog knows of checkpoints and their copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from math import isfinite
from typing import NamedTuple

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow
from holdfast_service.control.insight.cached_value import CachedValue

MOMENT_S = 0.5  # without it, the first look after hours would get what was hours ago
FRESH_S, OLD_S = 15.0, 300.0  # a pass over all checkpoints is too slow for each look at a page


class CopyLag(NamedTuple):
    """Checkpoints without a copy in a replica: how many, and of the sound ones the bytes and when the first was created."""

    missing: int = 0
    bytes: int = 0
    since: float | None = None

    def seconds(self, now: float) -> float:
        """The age of the oldest sound one; 0 if there is none."""
        return 0.0 if self.since is None else max(now - self.since, 0.0)

    def and_of(self, other: CopyLag) -> CopyLag:
        """Those of both."""
        since = [one for one in (self.since, other.since) if one is not None]
        return CopyLag(self.missing + other.missing, self.bytes + other.bytes, min(since, default=None))


NO_LAG = CopyLag()


class CopyLags:
    """The lag of each replica, of all runs and of one. A look is a few seconds old. Thread-safe."""

    def __init__(self, database: Database, names: Collection[str] = (), clock: Callable[[], float] = time.time) -> None:
        """`names` are the replicas of this node, of which there may be no copy yet."""
        self._database, self._names, self.clock = database, names, clock
        self._looked = CachedValue(self._look, FRESH_S, OLD_S)

    def now(self) -> Mapping[str, CopyLag]:
        """By replica; `CatalogUnavailable`."""
        return _totals(self._looked.get())

    def seen(self) -> Mapping[str, CopyLag]:
        """By replica, as last seen: the catalog is waited for only a moment. Empty before the first look has ended."""
        return _totals(self._looked.last(MOMENT_S) or {})

    def seen_of(self, run: str) -> Mapping[str, CopyLag]:
        """The same of one run."""
        return {name: by_run.get(run, NO_LAG) for name, by_run in (self._looked.last() or {}).items()}

    def _look(self) -> dict[str, dict[str, CopyLag]]:
        with self._database.read() as session:
            known = set(session.scalars(select(ReplicaRow.tier).distinct()))
            return {name: _lacking(session, name) for name in {*known, *self._names}}


def _totals(lags: Mapping[str, Mapping[str, CopyLag]]) -> dict[str, CopyLag]:
    totals: dict[str, CopyLag] = {}
    for name, by_run in lags.items():
        total = NO_LAG
        for lag in by_run.values():
            total = total.and_of(lag)
        totals[name] = total
    return totals


def _lacking(session: Session, name: str) -> dict[str, CopyLag]:
    """By run; runs that lack nothing there are left out."""
    row, copy = CheckpointRow, ReplicaRow
    same = (copy.run == row.run, copy.step == row.step, copy.tier == name, copy.state == "present")
    sound = row.verified & row.damage.is_(None)
    columns = (func.count(), func.sum(case((sound, row.bytes), else_=0)), func.min(case((sound, row.created))))
    wanted = select(row.run, *columns).where(~select(copy.run).where(*same).exists()).group_by(row.run)
    found: dict[str, CopyLag] = {}
    for run, count, size, first in session.execute(wanted):
        since = seconds_of(first) if first else None
        found[run] = CopyLag(count, size or 0, since if since is not None and isfinite(since) else None)
    return found

"""Timings of rounds, counted as they end: the input of histograms and traces.

They are read from the catalog, where each measured phase is recorded, so the path of a save has no metrics code. Each look
takes the rounds that have ended since the one before; those before the first belong to an earlier process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.catalog.listing import GOING_ON
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, RoundRow
from holdfast_service.control.signals import Signal
from holdfast_service.observe.metrics import PHASES, SAVE_BOUNDS_S, Histogram

SETTLED_S = 600.0  # a phase that has not been noted so long after the round's end will not be
PENDING_MAX = 2000
_LAST = {"stall", "verify"}  # what is noted of a save after its end
BATCH = 500


class Seen(NamedTuple):
    """A round that has ended, with the phases that are new since the look before, in seconds."""

    id: int
    run: str
    step: int
    attempt: int
    world: int
    state: str
    code: str | None
    opened: float
    ended: float
    new: Mapping[str, float]
    first: bool  # not seen before


class SavedBytes(NamedTuple):
    """Bytes of committed checkpoints, and the part that was not written again."""

    saved: int
    linked: int


class RoundHistory:
    """Rounds of one node that have ended since the first look. Thread-safe."""

    def __init__(self, database: Database, node: str, clock: Callable[[], float] = time.time) -> None:
        self._database, self._node, self._clock = database, node, clock
        self._lock = threading.Lock()
        self._behind: int | None = None
        self._pending: dict[int, set[str]] = {}  # rounds that are not settled -> phases of them that were counted
        self._seen: set[int] = set()
        self._phases = {phase: Histogram(SAVE_BOUNDS_S) for phase in PHASES}
        self._bytes = SavedBytes(0, 0)
        self.seen: Signal[[Seen]] = Signal()  # a round has ended, or has more timings

    def update(self) -> None:
        """Count what has ended since the last look, and publish it."""
        with self._lock:
            for seen in list(self._ended()):
                for phase, seconds in seen.new.items():
                    self._phases[phase].add(seconds)
                self.seen.publish(seen)

    def counted(self) -> tuple[dict[str, Histogram], SavedBytes]:
        """Phases of all saves up to now, and the bytes of committed ones."""
        self.update()
        with self._lock:
            return {phase: histogram.copy() for phase, histogram in self._phases.items()}, self._bytes

    def _ended(self) -> Iterator[Seen]:
        with self._database.read() as session:
            if self._behind is None:
                self._behind = session.scalar(select(func.max(RoundRow.id))) or 0
                going = session.scalars(select(RoundRow.id).where(RoundRow.state.in_(GOING_ON)))
                self._pending = {round_id: set() for round_id in going}
            for row, size in self._rows(session):
                self._behind = max(self._behind, row.id)
                if row.node not in (None, self._node):
                    self._forget(row.id)
                    continue
                counted = self._pending.setdefault(row.id, set())
                if row.state in GOING_ON or row.ended is None:
                    continue
                yield self._noted(row, size, counted)
        for round_id in sorted(self._pending)[:-PENDING_MAX]:
            self._forget(round_id)

    def _rows(self, session: Session) -> Iterator[tuple[RoundRow, int | None]]:
        """The rounds that are not settled, then those after them."""
        at = (CheckpointRow.run == RoundRow.run) & (CheckpointRow.step == RoundRow.step)
        columns = select(RoundRow, CheckpointRow.bytes).outerjoin(CheckpointRow, at).order_by(RoundRow.id).limit(BATCH)
        pending = sorted(self._pending)
        for first in range(0, len(pending), BATCH):
            yield from (
                (row, size) for row, size in session.execute(columns.where(RoundRow.id.in_(pending[first : first + BATCH])))
            )
        while True:
            rows = session.execute(columns.where(RoundRow.id > (self._behind or 0))).all()
            yield from ((row, size) for row, size in rows)
            if len(rows) < BATCH:
                return

    def _noted(self, row: RoundRow, size: int | None, counted: set[str]) -> Seen:
        opened, ended = seconds_of(row.opened), seconds_of(row.ended or "")
        known = {phase: (row.measured or {}).get(f"{phase}_s") for phase in PHASES}
        if row.state == "committed":
            known["durable"] = max(ended - opened, 0.0)
        new = {phase: value for phase, value in known.items() if value is not None and phase not in counted and value < 1e9}
        first = row.id not in self._seen
        if first and row.state == "committed":
            found = row.measured or {}
            saved, linked = int(found.get("bytes") or size or 0), int(found.get("linked_bytes", 0))
            self._bytes = SavedBytes(self._bytes.saved + saved, self._bytes.linked + linked)
        self._seen.add(row.id)
        counted.update(new)
        if self._clock() - ended > SETTLED_S or (row.state == "committed" and counted >= _LAST):
            self._forget(row.id)
        return Seen(row.id, row.run, row.step, row.attempt, row.world, row.state, row.code, opened, ended, new, first)

    def _forget(self, round_id: int) -> None:
        self._pending.pop(round_id, None)
        self._seen.discard(round_id)

"""What the catalog says of all runs, kept, and read again of those runs alone of which something has happened since.

Whatever changes a run's figures leaves an event or a save that goes on. An event may be seen a moment before what it
tells of, so a run is read again for some seconds; and everything is, now and then, for what happens without an event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextvars import Context
from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from holdfast_service.control.catalog.run_settings import COLUMNS, RunSettings
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import EventRow, RoundRow, RunRow
from holdfast_service.control.insight import summary_rows
from holdfast_service.control.insight.facts import CheckpointFacts, ReplicaCounts, Save, Warned

FRESH_S = 0.5  # asked again sooner than that, the answer is the same
AGAIN_S = 3.0  # a run of which something happened is read again for so long
WHOLE_S = 30.0  # everything is read again after so long
BATCH = 200


class _Said(NamedTuple):
    """A run's own row: its newest attempt, and what people have set."""

    attempt: int
    settings: RunSettings


class RunRows(NamedTuple):
    """What the catalog says of one run."""

    attempt: int
    held: CheckpointFacts = CheckpointFacts()
    saves: tuple[Save, ...] = ()
    declared: tuple[float, ...] = ()
    copies: Mapping[str, ReplicaCounts] = {}
    settings: RunSettings = RunSettings()
    warned: tuple[Warned, ...] = ()

    @property
    def said(self) -> _Said:
        return _Said(self.attempt, self.settings)


def read(session: Session, runs: Collection[str]) -> dict[str, RunRows]:
    """Of those of these runs that exist."""
    known = _said(session, runs)
    held, saves = summary_rows.held(session, runs), summary_rows.saves(session, runs)
    declared, copies = summary_rows.declared(session, runs), summary_rows.copies(session, runs)
    warned = summary_rows.warned(session, runs)
    return {
        run: RunRows(
            said.attempt,
            held.get(run, CheckpointFacts()),
            tuple(saves.get(run, ())),
            tuple(declared.get(run, ())),
            copies.get(run, {}),
            said.settings,
            tuple(warned.get(run, ())),
        )
        for run, said in known.items()
    }


def _said(session: Session, runs: Collection[str] | None = None) -> dict[str, _Said]:
    columns = select(RunRow.name, RunRow.attempt, *COLUMNS)
    found = session.execute(columns if runs is None else columns.where(RunRow.name.in_(runs)))
    return {run: _Said(attempt, RunSettings(*said)) for run, attempt, *said in found}


class KnownRows:
    """The rows of all runs of a catalog, for every token. Thread-safe."""

    def __init__(self, database: Database, fresh_s: float = FRESH_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._database, self._fresh_s, self._clock = database, fresh_s, clock
        self._reading = threading.Lock()
        self._rows: dict[str, RunRows] = {}
        self._again: dict[str, float] = {}  # runs that are read again, until when
        self._event = -1  # the newest that was seen
        self._looked = self._whole = float("-inf")

    def all(self) -> Mapping[str, RunRows]:
        """What is known of every run; `CatalogUnavailable`."""
        with self._reading:
            if self._clock() - self._looked > self._fresh_s:
                Context().run(self._look)  # not as the request that happens to ask: others are given it as well
            return self._rows

    def renew(self) -> None:
        """The next question is answered with how it is then."""
        with self._reading:
            self._looked = float("-inf")

    def _look(self) -> None:
        now = self._clock()
        with self._database.read() as session:
            said = _said(session)
            names = said.keys()
            newest = session.scalar(select(func.max(EventRow.id))) or 0
            due = self._due(session, newest, now)
            changed = {run for run in names if run not in self._rows or said[run] != self._rows[run].said}
            wanted = names if due is None else (names & due) | changed
            found: dict[str, RunRows] = {}
            ordered = sorted(wanted)
            for first in range(0, len(ordered), BATCH):
                found |= read(session, ordered[first : first + BATCH])
        kept = {run: rows for run, rows in self._rows.items() if run in names}
        self._rows, self._event, self._looked = kept | found, newest, now
        if due is None:
            self._whole = now

    def _due(self, session: Session, newest: int, now: float) -> set[str] | None:
        """The runs that are to be read; None for all of them."""
        if now - self._whole > WHOLE_S or newest < self._event:  # the catalog may be another one
            return None
        told = session.scalars(select(EventRow.run).where(EventRow.id > self._event, EventRow.run.is_not(None)).distinct())
        going = session.scalars(select(RoundRow.run).where(RoundRow.state.in_(("open", "sealed"))).distinct())
        self._again |= {run: now + AGAIN_S for run in [*told, *going] if run is not None}
        self._again = {run: until for run, until in self._again.items() if until >= now}
        return set(self._again)

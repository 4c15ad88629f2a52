"""Runs without any save: limits how many one caller may create, and sweeps them.

A hello creates a run: an attempt, perhaps a run file, a row of the catalog. If nothing is saved to it before its ranks are
gone, it stays listed for some hours, so that its death is visible, and is then deleted. Settings that a person has made, and
foreign files, keep it for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy import delete, select

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, LimitExceeded
from holdfast_service.control.catalog.attempts import Attempts, RunAttempts
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.listing import GOING_ON
from holdfast_service.control.checkpoints import removal, roots
from holdfast_service.control.checkpoints.run_files import RunFiles
from holdfast_service.control.database.cluster_schema import NodeRanksRow, SpeakerRow
from holdfast_service.control.database.schema import (
    AnswerRow,
    AttemptRow,
    CheckpointRow,
    JobRow,
    ReplicaRow,
    RoundRow,
    RunRow,
    StatisticsRow,
)
from holdfast_service.storage import Records

log = logging.getLogger(__name__)

EMPTY_RUNS_MAX = 200  # made by one tenant, without a save
KEPT_S = 6 * 3600.0  # after its ranks were first missed
_OF_A_RUN = (AnswerRow, AttemptRow, RoundRow, SpeakerRow, StatisticsRow)


class EmptyRuns:
    """The runs of one root without checkpoints. Thread-safe; call `sweep` while no rank can join the run."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        records: Records,
        catalog: Catalog,
        attempts: Attempts,
        files: RunFiles,
        events: Events,
        *,
        kept_s: float = KEPT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._records, self._catalog, self._attempts, self._files, self._events = records, catalog, attempts, files, events
        self._kept_s, self._clock = kept_s, clock
        self._lock = threading.Lock()
        self._made: dict[str, set[str]] = {}  # by tenant, since this daemon began
        self._missed: dict[str, tuple[RunAttempts, float]] = {}  # since when no rank of a run was seen, by this daemon

    def admit(self, run: str, tenant: str) -> None:
        """Raise `LimitExceeded` for a new run if its tenant already has too many without a save."""
        with self._lock:
            if self._attempts.newest(run) or self._records.list(naming.check_run(run)):
                return
            runs = self._made.setdefault(tenant, set())
            if len(runs) >= EMPTY_RUNS_MAX:
                runs.intersection_update([name for name in runs if self._attempts.newest(name) and not self._holds(name)])
            if len(runs) >= EMPTY_RUNS_MAX:
                owner = tenant or "this daemon's own user"
                raise LimitExceeded(
                    f"{run!r} would be a new run, but {owner} already has {len(runs)} runs without a save",
                    hint="use one of those, or save to them first; runs whose ranks are gone are removed after "
                    f"{self._kept_s / 3600:g} hours",
                    empty=len(runs),
                )
            runs.add(run)

    def due(self) -> dict[str, RunAttempts]:
        """The runs that have been empty and without ranks for long enough, with their declared attempts. Each of several
        nodes knows its own.
        """
        known = self._attempts.known()
        runs = sorted(known.keys() | set(roots.runs(self._records)))
        empty = {run: known.get(run, RunAttempts()) for run in runs if removal.is_bare(self._records, run)}
        self._missed = {run: missed for run, missed in self._missed.items() if missed[0] == empty.get(run)}
        return {run: declared for run, declared in empty.items() if self._deserted_s(run, declared) >= self._kept_s}

    def forget(self, run: str) -> bool:
        """Remove the run from the catalog. False if the catalog has more of it than attempts.

        Called before `sweep`, because attempts must never be lower than the catalog's.
        """
        with self._catalog.database.write() as session:
            kept = (
                select(CheckpointRow.step).where(CheckpointRow.run == run),
                select(ReplicaRow.step).where(ReplicaRow.run == run),
                select(NodeRanksRow.node).where(NodeRanksRow.run == run, NodeRanksRow.ranks > 0),
                select(RoundRow.id).where(RoundRow.run == run, RoundRow.state.in_(("committed", *GOING_ON))),
                select(JobRow.id).where(JobRow.run == run, JobRow.state.in_(("queued", "running"))),
            )
            if any(session.scalar(rows.limit(1)) is not None for rows in kept):
                return False
            for table in _OF_A_RUN:
                session.execute(delete(table).where(table.run == run))
            session.execute(delete(RunRow).where(RunRow.name == run))
        return True

    def sweep(self, run: str, declared: RunAttempts) -> bool:
        """Remove the rest of a run after `forget`.

        False if a rank has said hello since, or if its directory holds anything else.
        """
        if self._attempts.known().get(run, RunAttempts()) != declared:
            return False
        with self._files.exclusively(run):
            if not removal.remove_bare_run(self._records, run):
                return False
        self._attempts.forget(run)
        text = "the run is no longer listed: nothing was ever saved to it, and its ranks are long gone"
        self._events.add("run-swept", text, run, attempt=declared.attempt)
        log.info("removed the empty run %s: nothing was ever saved to it", run)
        return True

    def restore(self, run: str) -> None:
        """Put a run that is not swept after all back into the catalog."""
        self._catalog.note_attempts({run: self._attempts.known().get(run, RunAttempts())})
        try:
            self._catalog.set_keep_last(run, self._files.read(run).in_force.last)
        except CheckpointError as error:
            log.info("cannot determine how many checkpoints %s keeps: %s", run, error.detail)

    def _holds(self, run: str) -> bool:
        return bool(self._records.list(f"{run}/{naming.CHECKPOINTS}"))

    def _deserted_s(self, run: str, declared: RunAttempts) -> float:
        """How long this daemon has measured the run to be without ranks: a clock that jumps does not count."""
        if declared.life == "running":
            return 0.0
        now = self._clock()
        return now - self._missed.setdefault(run, (declared, now))[1]

"""The states of runs' ranks: whether they are running, have finished or died, and since when."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.rest.measurements import Life
from holdfast_formats.rest.operations import Level
from holdfast_formats.timestamps import seconds_of, utc_now
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.insight import run_figures
from holdfast_service.control.insight.facts import UNKNOWN, Facts, RunActivity
from holdfast_service.control.insight.run_lifecycle import failed_to_start

# By whether the run failed to start: kind, words and level of the event.
_DEATHS: Mapping[bool, tuple[str, str, Level]] = {
    False: ("run-died", "died: its ranks were killed or ended by an exception", "error"),
    True: ("run-failed", "failed to start: its ranks ended before anything was saved", "warning"),
}


class KnownLifecycles:
    """The states of the newest attempts. Thread-safe."""

    def __init__(
        self, attempts: Attempts, catalog: Catalog, record_queue: RecordQueue, tell: Callable[..., None], *, shared: bool
    ) -> None:
        """`tell` records an event asynchronously. `shared`: other nodes serve the same root."""
        self._attempts, self._catalog, self._record_queue, self._tell, self._shared = (
            attempts,
            catalog,
            record_queue,
            tell,
            shared,
        )

    def by_run(self, runs: Collection[str] | None, here: Mapping[str, tuple[int, Life]]) -> dict[str, RunActivity]:
        """What is known of the ranks of these runs, or of all, with what is known `here` of those that came to this
        daemon.
        """
        known = self._attempts.known(runs)
        found = {run: (one.attempt, RunActivity(one.life, one.since)) for run, one in known.items()}
        if self._shared:
            found |= {run: lived for run, lived in self._noted(runs).items() if lived[0] > found.get(run, (0, UNKNOWN))[0]}
        for run, (attempt, life) in here.items():
            if run in found and found[run][0] == attempt and found[run][1].life != life:
                found[run] = attempt, RunActivity(life)
        return {run: lived for run, (_, lived) in found.items()}

    def _noted(self, runs: Collection[str] | None) -> dict[str, tuple[int, RunActivity]]:
        """What other nodes have noted of runs."""
        try:
            noted = self._catalog.lives(runs)
        except CatalogUnavailable:
            return {}
        return {run: (attempt, RunActivity(life, since)) for run, (attempt, life, since) in noted.items()}

    def running(self) -> dict[str, int]:
        """The attempts whose ranks were last recorded as running here."""
        return {run: known.attempt for run, known in self._attempts.known().items() if known.life == "running"}

    def became(self, run: str, attempt: int, life: Life) -> None:
        """Record that the ranks of an attempt are running, have finished or died; durable, for the next daemon."""
        at = utc_now()
        if not self._attempts.became(run, attempt, life, at):
            return
        since = None if life == "running" else at
        if self._shared:  # other nodes show it too
            self._record_queue.enqueue(
                "whether a run's ranks are alive", lambda: self._catalog.note_life(run, attempt, life, since)
            )
        if life == "finished":
            self._tell("run-finished", f"attempt {attempt} has finished", run, attempt=attempt)
        elif life == "died":  # its saves are recorded first
            self._record_queue.enqueue(f"how {run} died", lambda: self._warn_of_death(run, attempt, at))

    def _warn_of_death(self, run: str, attempt: int, at: str) -> None:
        with self._catalog.database.read() as session:
            of = run_figures.read(session, [run]).get(run, run_figures.RunRows(attempt)).figures
        now = seconds_of(at)
        facts = Facts(run, attempt, now, held=of.held, saves=of.saves, declared=of.declared, life="died", since=at)
        kind, how, level = _DEATHS[failed_to_start(facts)]
        self._tell(kind, f"attempt {attempt} {how}", run, level=level, attempt=attempt)

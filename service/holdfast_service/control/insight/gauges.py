"""Prometheus gauges from the catalog: by run, for the newest runs, and over all checkpoints, jobs and copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from sqlalchemy import ColumnElement, case, func, select

from holdfast_formats.rest.operations import JobState
from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.schema import CheckpointRow, JobRow, ReplicaRow, RoundRow
from holdfast_service.control.insight.cached_value import CachedValue
from holdfast_service.control.insight.copy_lags import CopyLags
from holdfast_service.control.insight.facts import Facts
from holdfast_service.control.insight.run_lifecycle import state_of
from holdfast_service.control.insight.summary import exposure, failing, interval
from holdfast_service.control.insight.summary_queries import Summaries
from holdfast_service.observe.metrics import RUNS_MAX

Samples = Sequence[tuple[tuple[str, ...], float]]

ROUNDS_SEEN = 20_000  # runs with older saves have no gauges of their own
OVERALL_FRESH_S, OVERALL_OLD_S = 60.0, 300.0
CHECKPOINT_STATES = ("committed", "verified", "unhealthy", "abandoned", "damaged")
JOB_STATES: tuple[JobState, ...] = ("queued", "running", "done", "failed", "cancelled")


class _Overall(NamedTuple):
    """Figures of a pass over all checkpoints, which is too slow for each scrape."""

    states: Mapping[str, int]
    unread_since: float | None
    damaged_copies: Mapping[str, int]


class Gauges:
    """Read at the moment of the scrape, except for a pass over all checkpoints: that is a minute old, five at most."""

    def __init__(
        self, catalog: Catalog, summaries: Summaries, lags: CopyLags, clock: Callable[[], float] = time.time
    ) -> None:
        self._database, self._summaries, self._lags, self._clock = catalog.database, summaries, lags, clock
        self._overall = CachedValue(self._look, OVERALL_FRESH_S, OVERALL_OLD_S)

    def now(self) -> dict[str, Samples]:
        overall, now = self._overall.get(), self._clock()
        lag = () if overall.unread_since is None else [((), max(now - overall.unread_since, 0.0))]
        missing = sorted(self._lags.now().items())
        return {
            **self.by_run(),
            "holdfast_checkpoints": [((state,), overall.states.get(state, 0)) for state in CHECKPOINT_STATES],
            "holdfast_scrub_lag_seconds": lag,
            "holdfast_replica_missing": [((tier,), lacks.missing) for tier, lacks in missing],
            "holdfast_replica_missing_bytes": [((tier,), lacks.bytes) for tier, lacks in missing],
            "holdfast_replica_lag_seconds": [((tier,), lacks.seconds(now)) for tier, lacks in missing],
            "holdfast_replica_damaged": [((tier,), count) for tier, count in sorted(overall.damaged_copies.items())],
            "holdfast_jobs": self._jobs(),
        }

    def active(self) -> list[str]:
        """The runs that have saved last, the newest first."""
        newest = func.max(RoundRow.id)
        with self._database.read() as session:
            behind = (session.scalar(select(newest)) or 0) - ROUNDS_SEEN
            wanted = select(RoundRow.run).where(RoundRow.id > behind).group_by(RoundRow.run).order_by(newest.desc())
            return list(session.scalars(wanted.limit(RUNS_MAX)))

    def by_run(self) -> dict[str, Samples]:
        """Samples of each visible run."""
        samples: dict[str, list[tuple[tuple[str, ...], float]]] = {name: [] for name in _BY_RUN}
        for facts in self._summaries.facts(self.active()):
            for name, value_of in _BY_RUN.items():
                value = value_of(facts)
                if value is not None:
                    samples[name].append(((facts.run,), value))
        return dict(samples)

    def _jobs(self) -> Samples:
        with self._database.read() as session:
            counted = session.execute(select(JobRow.state, func.count()).group_by(JobRow.state)).all()
        counts = {state: count for state, count in counted}
        return [((state,), counts.get(state, 0)) for state in JOB_STATES]

    def _look(self) -> _Overall:
        row, copy = CheckpointRow, ReplicaRow
        state = case(
            (row.damage.is_not(None), "damaged"),
            (row.abandoned.is_(True), "abandoned"),
            (row.healthy.is_(False), "unhealthy"),
            (row.verified, "verified"),
            else_="committed",
        )
        damaged: ColumnElement[int] = func.count(case((copy.state == "damaged", copy.step)))
        each = select(
            state.label("state")
        ).subquery()  # PostgreSQL takes an expression with parameters for another in GROUP BY
        with self._database.read() as session:
            counted = session.execute(select(each.c.state, func.count()).group_by(each.c.state))
            states = {name: count for name, count in counted}
            oldest = session.scalar(select(func.min(func.coalesce(row.checked, row.created))))
            copies = {tier: count for tier, count in session.execute(select(copy.tier, damaged).group_by(copy.tier))}
        since = seconds_of(oldest) if oldest else None
        return _Overall(
            states,
            since if since is not None and isfinite(since) else None,
            copies,
        )


def _age(of: Callable[[Facts], str | None]) -> Callable[[Facts], float | None]:
    def age(facts: Facts) -> float | None:
        created = of(facts)
        at = seconds_of(created) if created is not None else float("inf")
        return max(facts.now - at, 0.0) if isfinite(at) else None

    return age


_BY_RUN: dict[str, Callable[[Facts], float | None]] = {
    "holdfast_last_commit_age_seconds": _age(lambda facts: facts.held.created),
    "holdfast_last_verified_age_seconds": _age(lambda facts: facts.held.verified_created),
    "holdfast_run_died": lambda facts: None if facts.life is None else float(state_of(facts).life == "died"),
    "holdfast_exposed_seconds": lambda facts: exposure(facts)[0],
    "holdfast_exposed_steps": lambda facts: exposure(facts)[1],
    "holdfast_save_interval_seconds": lambda facts: interval(facts.saves)[0],
    "holdfast_save_failures": lambda facts: failing(facts.saves),
    "holdfast_run_bytes": lambda facts: facts.held.bytes,
    "holdfast_run_quota_bytes": lambda facts: facts.quota_bytes,
}

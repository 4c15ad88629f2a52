"""Prometheus gauges from the catalog: by run, for the newest runs, and over all checkpoints, jobs and copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.orm import Session

from holdfast_formats.rest.operations import JobState
from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.schema import CheckpointRow, JobRow, ReplicaRow, RoundRow
from holdfast_service.control.insight.cached_value import CachedValue
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


class _Missing(NamedTuple):
    """Checkpoints that have no copy in a tier: how many, and of the sound ones the bytes and when the first was created."""

    number: int
    bytes: int
    since: float | None


class _Overall(NamedTuple):
    """Figures of a pass over all checkpoints, which is too slow for each scrape."""

    states: Mapping[str, int]
    unread_since: float | None
    missing: Mapping[str, _Missing]
    damaged_copies: Mapping[str, int]


class Gauges:
    """Read at the moment of the scrape, except for a pass over all checkpoints: that is a minute old, five at most."""

    def __init__(
        self, catalog: Catalog, summaries: Summaries, clock: Callable[[], float] = time.time, tiers: Collection[str] = ()
    ) -> None:
        """`tiers` are the replicas of this node, of which there may be no copy yet."""
        self._database, self._summaries, self._clock, self._tiers = catalog.database, summaries, clock, tiers
        self._overall = CachedValue(self._look, OVERALL_FRESH_S, OVERALL_OLD_S)

    def now(self) -> dict[str, Samples]:
        overall, now = self._overall.get(), self._clock()
        lag = () if overall.unread_since is None else [((), max(now - overall.unread_since, 0.0))]
        missing = sorted(overall.missing.items())
        return {
            **self.by_run(),
            "holdfast_checkpoints": [((state,), overall.states.get(state, 0)) for state in CHECKPOINT_STATES],
            "holdfast_scrub_lag_seconds": lag,
            "holdfast_replica_missing": [((tier,), lacks.number) for tier, lacks in missing],
            "holdfast_replica_missing_bytes": [((tier,), lacks.bytes) for tier, lacks in missing],
            "holdfast_replica_lag_seconds": [
                ((tier,), 0.0 if lacks.since is None else max(now - lacks.since, 0.0)) for tier, lacks in missing
            ],
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
            missing = {tier: _missing(session, tier) for tier in {*copies, *self._tiers}}
        since = seconds_of(oldest) if oldest else None
        return _Overall(
            states,
            since if since is not None and isfinite(since) else None,
            missing,
            copies,
        )


def _missing(session: Session, tier: str) -> _Missing:
    row, copy = CheckpointRow, ReplicaRow
    same = (copy.run == row.run, copy.step == row.step, copy.tier == tier, copy.state == "present")
    sound = row.verified & row.damage.is_(None)
    columns = (func.count(), func.sum(case((sound, row.bytes), else_=0)), func.min(case((sound, row.created))))
    count, size, first = session.execute(select(*columns).where(~select(copy.run).where(*same).exists())).one()
    since = seconds_of(first) if first else None
    return _Missing(count, size or 0, since if since is not None and isfinite(since) else None)


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

"""Rows of the catalog for summaries: a few queries for a page of runs, each bounded by the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import msgspec
from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Executable,
    ScalarSelect,
    Subquery,
    Text,
    bindparam,
    case,
    false,
    func,
    select,
    tuple_,
    type_coerce,
)
from sqlalchemy.orm import Session, aliased

from holdfast_formats import metric_values
from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.database.schema import (
    OCCUPIED,
    AttemptRow,
    CheckpointRow,
    EventRow,
    ReplicaRow,
    RoundRow,
    RunRow,
)
from holdfast_service.control.findings.missing import is_over
from holdfast_service.control.insight.facts import NOTHING, CheckpointFacts, NonFiniteSince, ReplicaCounts, Save, Warned

UNHEALTHY = "checkpoint-unhealthy"
WARNINGS = ("checkpoint-missing", "removal-waits")
SAVES = 20  # the newest saves, which the figures are taken from
ATTEMPTS = 64  # the newest attempts, which the time between failures is taken from
MEASURED = ("stall_s", "bytes", "write_s", "disk_bytes_per_second")  # what summaries take of what was measured
_decode = msgspec.json.Decoder(dict[str, float]).decode
_decode_metrics = msgspec.json.Decoder(dict[str, float | metric_values.Word]).decode


# The statements are made once: to make them took as long as to answer them.
RUNS: BindParameter[Any] = bindparam("runs", expanding=True)


def held(session: Session, runs: Collection[str]) -> dict[str, CheckpointFacts]:
    """The totals of each run's checkpoints, and the newest one."""
    rows = (tuple(values) for values in session.execute(_held(), {RUNS.key: list(runs)}))
    facts = {
        run: CheckpointFacts(count, int(size), *more)._replace(metrics=decoded_metrics(metrics), newest_sound=newest_sound)
        for run, count, size, *more, newest_sound, metrics in rows
    }
    return _with_beginnings(session, _with_copies(session, facts))


def decoded_metrics(stored: str) -> dict[str, float]:
    """Metrics of a checkpoint, as the catalog stores them."""
    return {name: metric_values.read(value) for name, value in _decode_metrics(stored).items()}


@lru_cache(1)
def _held() -> Executable:
    """Totals and columns of each run's newest checkpoints.

    As long as the newest one with known health is unhealthy, later ones are not assumed to be healthy: a run that saves
    often has some unchecked ones at any moment.
    """
    at = _steps().c
    ill = at.unhealthy > func.coalesce(at.proven, -1)
    older = aliased(CheckpointRow)
    before = select(func.max(older.step)).where(
        older.run == at.run, older.step < at.first_unhealthy, older.damage.is_(None), older.abandoned.is_(False)
    )
    good = case((ill, func.coalesce(at.proven, before.scalar_subquery())), else_=at.presumed)
    last, verified, healthy, judged = (aliased(CheckpointRow) for _ in range(4))
    return (
        select(
            *(at.run, at.checkpoints, at.total, at.newest, at.newest_verified, good, at.damaged, at.newest_damaged),
            *(last.bytes - last.shared_bytes, last.created, case((ill, false()), else_=last.healthy), last.same_as),
            case((ill, judged.nonfinite), else_=last.nonfinite),
            *(verified.created, case((ill, at.unhealthy)), healthy.created, func.coalesce(healthy.verified, false())),
            at.newest_sound,
            type_coerce(last.metrics, Text),
        )
        .join(last, (last.run == at.run) & (last.step == at.newest))
        .outerjoin(verified, (verified.run == at.run) & (verified.step == at.newest_verified))
        .outerjoin(healthy, (healthy.run == at.run) & (healthy.step == good))
        .outerjoin(judged, (judged.run == at.run) & (judged.step == at.unhealthy))
    )


def _steps() -> Subquery:
    """Each run's totals, and the steps that its facts are about: most are found at an end of an index."""
    row, each = CheckpointRow, aliased(CheckpointRow)
    totals = (
        select(row.run, func.count().label("checkpoints"), func.sum(OCCUPIED).label("total"))
        .where(row.run.in_(RUNS))
        .group_by(row.run)
        .subquery()
    )
    living, damaged = each.abandoned.is_(False), each.damage.is_not(None)
    sound = each.damage.is_(None) & living
    ill = each.healthy.is_(False) & sound

    def step(of: Callable[[Any], Any], marks: ColumnElement[bool]) -> ScalarSelect[Any]:
        return select(of(each.step)).where(each.run == totals.c.run, marks).scalar_subquery()

    unhealthy = step(func.max, ill)
    return (
        select(
            totals,
            step(func.max, living).label("newest"),
            step(func.max, each.verified & living).label("newest_verified"),
            step(func.max, each.healthy.is_not(False) & sound).label("presumed"),
            case((unhealthy.is_not(None), step(func.max, each.healthy.is_(True) & sound))).label("proven"),
            unhealthy.label("unhealthy"),
            step(func.min, ill).label("first_unhealthy"),
            step(func.count, damaged).label("damaged"),
            step(func.max, damaged).label("newest_damaged"),
            step(func.max, sound).label("newest_sound"),
        )
        .offset(0)  # databases do not merge such a query into one that uses it, and so look for each step once
        .subquery()
    )


@lru_cache(1)
def _present() -> Executable:
    row = ReplicaRow
    pairs: BindParameter[Any] = bindparam("pairs", expanding=True)
    tiers = select(row.run, row.tier).where(tuple_(row.run, row.step).in_(pairs), row.state == "present")
    return tiers.order_by(row.tier)


def _with_copies(session: Session, facts: dict[str, CheckpointFacts]) -> dict[str, CheckpointFacts]:
    """With the tiers that also have each run's newest healthy checkpoint."""
    pairs = [(run, held.newest_healthy) for run, held in facts.items() if held.newest_healthy is not None]
    tiers: dict[str, list[str]] = defaultdict(list)
    for run, tier in session.execute(_present(), {"pairs": pairs}):
        tiers[run].append(tier)
    return facts | {run: facts[run]._replace(healthy_copies=tuple(names)) for run, names in tiers.items()}


@lru_cache(1)
def _beginning() -> Executable:
    """The first event about a step after the newest healthy one, unless training has gone on without that step."""
    row, checkpoint = EventRow, CheckpointRow
    left = select(checkpoint.step).where(
        checkpoint.run == row.run, checkpoint.step == row.step, checkpoint.abandoned.is_(True)
    )
    between = (row.step > bindparam("healthy"), row.step <= bindparam("unhealthy"))
    wanted = select(row.step, row.detail).where(row.kind == UNHEALTHY, row.run == bindparam("run"), *between, ~left.exists())
    return wanted.order_by(row.id).limit(1)


def _with_beginnings(session: Session, facts: dict[str, CheckpointFacts]) -> dict[str, CheckpointFacts]:
    """With the place where NaN began, for runs that have it now. Few have, and each needs a query."""
    found = dict(facts)
    for run, held in facts.items():
        if held.unhealthy is None:
            continue
        healthy = -1 if held.newest_healthy is None else held.newest_healthy
        place = {"run": run, "healthy": healthy, "unhealthy": held.unhealthy}
        event = session.execute(_beginning(), place).first()
        if event is not None and event.detail.get("tensors"):
            first = event.detail["tensors"][0]
            since = NonFiniteSince(
                event.step, first["group"], first["name"], first["nan"], first["inf"], event.detail.get("count")
            )
        else:  # events are not kept for ever
            since = NonFiniteSince(session.execute(_first_listed(), place).scalar_one())
        found[run] = held._replace(nonfinite_since=since)
    return found


@lru_cache(1)
def _first_listed() -> Executable:
    row = CheckpointRow
    between = (row.step > bindparam("healthy"), row.step <= bindparam("unhealthy"))
    ill = (row.healthy.is_(False), row.damage.is_(None), row.abandoned.is_(False))
    return select(func.min(row.step)).where(row.run == bindparam("run"), *between, *ill)


@lru_cache(1)
def _rounds() -> Executable:
    row, behind = RoundRow, aliased(RoundRow)
    oldest = select(behind.id).where(behind.run == RunRow.name).order_by(behind.id.desc()).offset(SAVES - 1).limit(1)
    columns = (row.run, row.step, row.attempt, row.state, row.opened, row.ended, row.code)
    return (
        select(*columns, type_coerce(row.measured, Text))  # decoded below, several times faster than by the column's type
        .select_from(RunRow)
        .join(row, (row.run == RunRow.name) & (row.id >= func.coalesce(oldest.scalar_subquery(), 0)))
        .where(RunRow.name.in_(RUNS))
        .order_by(row.run, row.id.desc())
    )


def saves(session: Session, runs: Collection[str]) -> dict[str, list[Save]]:
    """The newest rounds of each run, the newest first."""
    saves_of: dict[str, list[Save]] = defaultdict(list)
    for run, *values in session.execute(_rounds(), {RUNS.key: list(runs)}):
        saves_of[run].append(_save(*values))
    return saves_of


def _save(  # noqa: PLR0913 - a row
    step: int, attempt: int, state: str, opened: str, ended: str | None, code: str | None, measured: str | None
) -> Save:
    over = None if ended is None else seconds_of(ended)
    figures = _decode(measured) if measured else NOTHING
    kept = {name: figures[name] for name in MEASURED if name in figures}
    return Save(step, attempt, state, seconds_of(opened), over, code, kept)


@lru_cache(1)
def _attempts() -> Executable:
    columns = select(AttemptRow.run, AttemptRow.declared).join(RunRow, RunRow.name == AttemptRow.run)
    recent = columns.where(AttemptRow.run.in_(RUNS), AttemptRow.attempt > RunRow.attempt - ATTEMPTS)
    return recent.order_by(AttemptRow.attempt.desc())


def declared(session: Session, runs: Collection[str]) -> dict[str, list[float]]:
    """When the newest attempts of each run were declared, the newest first."""
    times: dict[str, list[float]] = defaultdict(list)
    for run, at in session.execute(_attempts(), {RUNS.key: list(runs)}):
        times[run].append(seconds_of(at))
    return times


@lru_cache(1)
def _warned() -> Executable:
    row = EventRow
    newest = select(func.max(row.id)).where(row.kind.in_(WARNINGS), row.run.in_(RUNS)).group_by(row.run, row.kind)
    return select(row.run, row.kind, row.text, row.step, row.at).where(row.id.in_(newest), ~is_over()).order_by(row.id)


def warned(session: Session, runs: Collection[str]) -> dict[str, list[Warned]]:
    """The warnings about each run's checkpoints, until they are over."""
    warnings: dict[str, list[Warned]] = defaultdict(list)
    for run, *values in session.execute(_warned(), {RUNS.key: list(runs)}):
        warnings[run].append(Warned(*values))
    return warnings


@lru_cache(1)
def _counted_copies() -> Executable:
    row = ReplicaRow
    each = (row.run, row.tier, row.state)
    return select(*each, func.max(row.step), func.count()).where(row.run.in_(RUNS)).group_by(*each)


@lru_cache(1)
def _failed_copies() -> Executable:
    row = ReplicaRow
    failed = select(row.run, row.tier, func.count(), func.max(type_coerce(row.problem, Text)))
    return failed.where(row.run.in_(RUNS), row.state == "copying", row.problem.is_not(None)).group_by(row.run, row.tier)


def copies(session: Session, runs: Collection[str]) -> dict[str, Mapping[str, ReplicaCounts]]:
    """The replicas of each run, by tier."""
    counts: dict[str, dict[str, ReplicaCounts]] = defaultdict(dict)
    wanted = {RUNS.key: list(runs)}
    for run, tier, state, step, count in session.execute(_counted_copies(), wanted):
        known = counts[run].get(tier, ReplicaCounts(None, 0))
        if state == "present":
            known = known._replace(newest=step)
        elif state == "damaged":
            known = known._replace(damaged=count)
        counts[run][tier] = known
    for run, tier, count, problem in session.execute(_failed_copies(), wanted):
        counts[run][tier] = counts[run][tier]._replace(failing=count, problem=_detail(problem))
    return dict(counts)


def _detail(problem: str) -> str:
    document = msgspec.json.decode(problem)
    return str(document.get("detail", "unknown")) if isinstance(document, dict) else "unknown"

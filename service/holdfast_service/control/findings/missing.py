"""Checkpoints that are gone from a root and were not removed through Holdfast: recorded as events until that is over."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import aliased

from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, EventRow, RunRow

log = logging.getLogger(__name__)

KIND = "checkpoint-missing"


def is_over() -> ColumnElement[bool]:
    """Whether an event's loss is over: the same checkpoint or a newer one was verified since, or the run was deleted."""
    later = aliased(EventRow)
    verified = (later.kind == "checkpoint-verified") & (later.step >= func.coalesce(EventRow.step, -1))
    ends = or_(verified, later.kind == "run-deleted")
    return select(later.id).where(later.run == EventRow.run, later.id > EventRow.id, ends).exists()


def missing(database: Database, run: str) -> list[int]:
    """The missing steps of a run, the newest first; without those that are listed again or obsolete."""
    listed = select(CheckpointRow.step).where(CheckpointRow.run == run)
    wanted = select(EventRow.step).where(EventRow.kind == KIND, EventRow.run == run, ~is_over())
    with database.read() as session:
        steps = session.scalars(wanted.where(EventRow.step.is_not(None), EventRow.step.not_in(listed)))
        return sorted({step for step in steps if step is not None}, reverse=True)


def tell(events: Events, run: str, step: int) -> str:
    """Record that a checkpoint is missing; the text."""
    text = f"step {step} is gone: something other than Holdfast removed its directory"
    events.add(KIND, text, run, step, level="error")
    return text


def living(catalog: Catalog) -> dict[str, set[int]]:
    """The listed steps of runs that were trained, without abandoned ones."""
    columns = select(CheckpointRow.run, CheckpointRow.step).join(RunRow, RunRow.name == CheckpointRow.run)
    steps: dict[str, set[int]] = {}
    with catalog.database.read() as session:
        for run, step in session.execute(columns.where(CheckpointRow.abandoned.is_(False), RunRow.attempt > 0)):
            steps.setdefault(run, set()).add(step)
    return steps


def lost_since(catalog: Catalog, before: Mapping[str, set[int]]) -> list[tuple[str, int]]:
    """Listed `before` and not now, without a newer one: no policy removes that. A deleted or renamed run has no attempt any
    more.
    """
    now = living(catalog)
    with catalog.database.read() as session:
        trained = set(session.scalars(select(RunRow.name).where(RunRow.attempt > 0)))
    return [
        (run, step)
        for run, steps in before.items()
        if run in trained
        for step in sorted(steps - now.get(run, set()))
        if step > max(now.get(run, set()), default=-1)
    ]


@contextmanager
def told(catalog: Catalog, events: Events) -> Iterator[None]:
    """Record what a comparison with the directories in this block finds to be gone: afterwards nothing else knows of it."""
    before = living(catalog)
    yield
    for run, step in lost_since(catalog, before):
        log.error("%s: %s", run, tell(events, run, step))

"""Checkpoints that are gone from a root and were not removed through Holdfast: which of them are missed still."""

from __future__ import annotations

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import aliased

from holdfast_service.control.catalog.losses import KIND
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, EventRow


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

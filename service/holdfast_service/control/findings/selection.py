"""Select a checkpoint: the newest healthy one, the best one, the previous one."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Literal

from sqlalchemy import ColumnElement, or_, select

from holdfast_formats import metric_values
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow

Mode = Literal["min", "max"]


def newest_before(database: Database, run: str, step: int) -> int | None:
    """The newest checkpoint of an earlier step that is not known to be damaged, nor abandoned."""
    wanted = select(CheckpointRow.step).where(
        CheckpointRow.run == run,
        CheckpointRow.step < step,
        CheckpointRow.damage.is_(None),
        CheckpointRow.abandoned.is_(False),
    )
    with database.read() as session:
        return session.scalar(wanted.order_by(CheckpointRow.step.desc()).limit(1))


def newest_healthy(database: Database, run: str, groups: Collection[str] = ()) -> int | None:
    """The newest checkpoint with all these groups that is verified, sound, not known to be unhealthy, and not abandoned."""
    columns = select(CheckpointRow.step, CheckpointRow.groups).where(*_good(run))
    with database.read() as session:
        rows = session.execute(columns.order_by(CheckpointRow.step.desc()))
        return next((step for step, held in rows if set(groups) <= set(held)), None)


def best(database: Database, run: str, metric: str, mode: Mode) -> int | None:
    """Among the candidates of `newest_healthy`, the one with the lowest or highest metric; of equal ones the oldest."""
    sign = 1 if mode == "min" else -1
    columns = select(CheckpointRow.step, CheckpointRow.metrics).where(*_good(run))
    with database.read() as session:
        rows = [(step, metric_values.read(metrics.get(metric, math.nan))) for step, metrics in session.execute(columns)]
    return min(((sign * value, step) for step, value in rows if math.isfinite(value)), default=(0, None))[1]


def _good(run: str) -> tuple[ColumnElement[bool], ...]:
    """Statistics exist before a checkpoint counts as verified; one without any counts as healthy."""
    healthy = or_(CheckpointRow.healthy.is_(None), CheckpointRow.healthy.is_(True))
    sound = (CheckpointRow.verified.is_(True), CheckpointRow.damage.is_(None), CheckpointRow.abandoned.is_(False))
    return CheckpointRow.run == run, *sound, healthy

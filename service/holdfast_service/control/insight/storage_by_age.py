"""How much each run holds, and of what age it is."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import and_, case, func, or_, select

from holdfast_formats import naming, timestamps
from holdfast_formats.rest import bodies
from holdfast_formats.rest.runs import RunStorage
from holdfast_service.control.catalog.listing import named, parse_time
from holdfast_service.control.catalog.pages import bad_cursor, bounded, decode_cursor, integer, page
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import OCCUPIED, CheckpointRow

DAY_S = 86_400.0
AGES_S = (DAY_S, 7 * DAY_S, 30 * DAY_S)
_KIND = "storage"


def storage_by_age(
    database: Database, now: str, prefix: str, words: Sequence[str], cursor: str | None, limit: int
) -> bodies.Page[RunStorage]:
    """Runs with a checkpoint, the largest first. `now` is an RFC 3339 time."""
    since = [parse_time(timestamps.later(now, -age_s)) for age_s in AGES_S]
    total = func.sum(OCCUPIED)
    within = [func.sum(case((CheckpointRow.created >= time, OCCUPIED), else_=0)) for time in since]
    wanted = select(CheckpointRow.run, func.count(), total, *within).group_by(CheckpointRow.run)
    if prefix or words:
        wanted = wanted.where(CheckpointRow.run.in_(named(prefix, words)))
    key = decode_cursor(_KIND, cursor)
    if key is not None:
        size, _, run = key.partition(":")
        if not naming.is_run_name(run):
            raise bad_cursor()
        wanted = wanted.having(or_(total < integer(size), and_(total == integer(size), CheckpointRow.run > run)))
    wanted = wanted.order_by(total.desc(), CheckpointRow.run).limit(bounded(limit) + 1)
    with database.read() as session:
        rows = session.execute(wanted).all()
    return page(_KIND, [_storage(*row) for row in rows], limit, lambda one: f"{one.bytes}:{one.run}")


def _storage(run: str, checkpoints: int, size: int, *within: int) -> RunStorage:
    day, week, month = (int(one) for one in within)  # each includes the one before; PostgreSQL answers with decimals
    return RunStorage(
        run=run,
        checkpoints=checkpoints,
        bytes=int(size),
        day_bytes=day,
        week_bytes=week - day,
        month_bytes=month - week,
        older_bytes=int(size) - month,
    )

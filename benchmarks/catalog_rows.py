"""The rows of a large catalog, put there without the saves that would have made them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

from sqlalchemy import insert

from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, EventRow, RoundRow, RunRow

START = datetime(2030, 1, 1, tzinfo=timezone.utc)


class Size(NamedTuple):
    runs: int
    checkpoints: int
    repeats: int


def at(minute: float) -> str:
    return (START + timedelta(minutes=minute)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def name(run: int) -> str:
    return f"run-{run:05d}"


def fill(database: Database, size: Size) -> None:
    """Rows as saves would have made them, without the saves."""
    with database.write() as session:
        session.execute(insert(RunRow), [{"name": name(run), "attempt": 1, "keep_last": None} for run in range(size.runs)])
        for run in range(size.runs):
            session.execute(insert(CheckpointRow), [a_checkpoint(size, run, step) for step in range(size.checkpoints)])
        for step in range(size.checkpoints):
            facts = [{"run": name(run), "step": step, "at": when(size, run, step)} for run in range(size.runs)]
            ended = {"attempt": 1, "world": 64, "state": "committed", "sealed": 64, "measured": {"write_s": 1.5}}
            session.execute(
                insert(RoundRow),
                [{"run": f["run"], "step": step, "opened": f["at"], "ended": f["at"], **ended} for f in facts],
            )
            if step * 5 >= size.checkpoints * 4:  # the ring holds the newest
                told = {"kind": "checkpoint-committed", "level": "info", "node": "n", "text": "committed", "detail": {}}
                session.execute(insert(EventRow), [{**f, **told} for f in facts])
    if database.engine.dialect.name == "postgresql":
        with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.exec_driver_sql("VACUUM ANALYZE")  # what the server does by itself, some minutes later


def when(size: Size, run: int, step: int) -> str:
    return at((step * size.runs + run) / 10)


def a_checkpoint(size: Size, run: int, step: int) -> dict[str, Any]:
    facts: dict[str, Any] = {"run": name(run), "step": step, "created": when(size, run, step), "verified": step % 10 != 9}
    held = {"groups": ["model", "optim"], "tensors": 291, "files": 9, "bytes": 16 * 2**30, "metrics": {"loss": 2.5}}
    since = {"checked": facts["created"], "check": {"seconds": 1.5}, "healthy": True, "nonfinite": 0}
    return {**facts, **held, **since, "attempt": 1, "world": 64, "stamp": "1.2.3 4.5.6"}

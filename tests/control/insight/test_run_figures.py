"""Figures of runs say what their rows say, whoever has changed these, whether they were renewed since or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.database import changes
from holdfast_service.control.database.columns import CatalogTable
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import (
    AttemptRow,
    CheckpointRow,
    EventRow,
    ReplicaRow,
    RoundRow,
    RunChangeRow,
    RunFiguresRow,
    RunRow,
)
from holdfast_service.control.database.visible import limited_to
from holdfast_service.control.insight import run_figures
from tests.control.published import a_row
from tests.daemons import wait_until
from tests.databases import sqlite_url

BEGAN = "2030-01-01T00:00:00.000Z"
COPY = {"tier": "far", "state": "present", "bytes": 1, "since": BEGAN}
SAVED = {"attempt": 1, "world": 1, "state": "committed", "sealed": 1, "opened": BEGAN, "measured": {"stall_s": 0.5}}
WARNED = {"at": BEGAN, "kind": "removal-waits", "level": "warning", "node": "b", "text": "it waits", "detail": {}}
CHANGES: dict[str, Callable[[Session], object]] = {
    "a checkpoint is damaged": lambda s: s.execute(
        update(CheckpointRow).where(CheckpointRow.run == "one").values(damage={"code": "corrupt-extent"})
    ),
    "a checkpoint is gone": lambda s: s.execute(delete(CheckpointRow).where(CheckpointRow.run == "one")),
    "a save ends": lambda s: s.execute(insert(RoundRow).values(run="one", step=7, **SAVED)),
    "an attempt is declared": lambda s: s.execute(
        insert(AttemptRow).values(run="one", launch="next", attempt=2, world=1, declared=BEGAN)
    ),
    "a copy is made": lambda s: s.execute(insert(ReplicaRow).values(run="one", step=1, **COPY)),
    "an event warns": lambda s: s.execute(insert(EventRow).values(run="one", step=1, **WARNED)),
    "its checkpoints are another run's": lambda s: s.execute(
        update(CheckpointRow).where(CheckpointRow.run == "one").values(run="two", step=CheckpointRow.step + 10)
    ),
}


def filled(database: Database) -> None:
    catalog = Catalog(database)
    for run in ("one", "two"):
        catalog.declare_attempt(run, "launch", 1, BEGAN)
        catalog.record_checkpoint(a_row(run, 1))


def renewed(database: Database) -> int:
    """Renew all; how many changes are listed after it."""
    while run_figures.renew(database):
        pass
    with database.read() as session:
        return session.scalar(select(func.count()).select_from(RunChangeRow)) or 0


def stored_and_computed(database: Database) -> tuple[object, object]:
    with database.read() as session:
        found = run_figures.read(session)
        return {run: rows.figures for run, rows in found.items()}, run_figures.compute(session, sorted(found))


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_changes_a_run_changes_its_figures(database: Database, change: str) -> None:
    """In the same transaction, and before they are renewed as after it; those of other runs stay stored."""
    filled(database)
    assert renewed(database) == 0
    before, _ = stored_and_computed(database)
    with database.write() as session:
        CHANGES[change](session)
        session.flush()
        assert session.scalars(select(RunChangeRow.run).where(RunChangeRow.run == "one")).first() == "one"
    now, computed = stored_and_computed(database)
    assert now == computed != before
    assert renewed(database) == 0
    assert stored_and_computed(database)[0] == computed


def test_what_is_not_committed_changes_nothing(database: Database) -> None:
    """A transaction that fails leaves no change and no other figures."""
    filled(database)
    renewed(database)
    with pytest.raises(ValueError, match="mine"), database.write() as session:
        session.execute(delete(CheckpointRow))
        raise ValueError("mine")
    assert renewed(database) == 0
    with database.read() as session:
        assert run_figures.read(session)["one"].figures.held.checkpoints == 1


def test_runs_come_and_go(database: Database) -> None:
    """The figures of a run that is gone go too; a viewer of one run gets that one."""
    filled(database)
    renewed(database)
    with database.write() as session:
        for table in (CheckpointRow, AttemptRow):
            session.execute(delete(table).where(table.run == "one"))
        session.execute(delete(RunRow).where(RunRow.name == "one"))
    Catalog(database).declare_attempt("three", "launch", 1, BEGAN)
    renewed(database)
    with database.read() as session:
        assert set(run_figures.read(session)) == {"two", "three"} == set(session.scalars(select(RunFiguresRow.run)))
    with limited_to("two"), database.read() as session:
        assert set(run_figures.read(session)) == {"two"}


def test_a_change_during_a_renewal_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is listed behind those that the renewal has read. (SQLite has one writer; a server, several.)"""
    database = Database.open(sqlite_url(tmp_path / "catalog.sqlite"))
    filled(database)
    compute = run_figures.compute

    def meanwhile(session: Session, runs: list[str]) -> dict[str, run_figures.StoredFigures]:
        found = compute(session, runs)
        CHANGES["a save ends"](session)
        return found

    monkeypatch.setattr(run_figures, "compute", meanwhile)
    run_figures.renew(database)
    monkeypatch.undo()
    now, computed = stored_and_computed(database)
    assert now == computed
    database.close()


def test_many_runs_are_renewed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No transaction is long; a run that was left for the next part is right all the same."""
    monkeypatch.setattr(run_figures, "BATCH", 2)
    database = Database.open(sqlite_url(tmp_path / "catalog.sqlite"))
    for number in range(5):
        Catalog(database).declare_attempt(f"r{number}", "launch", 1, BEGAN)
    assert run_figures.renew(database)
    now, computed = stored_and_computed(database)
    assert now == computed and renewed(database) == 0
    database.close()


def test_the_thread_that_writes_the_catalog_renews_them(tmp_path: Path) -> None:
    """Soon after what it has written."""
    database = Database.open(sqlite_url(tmp_path / "catalog.sqlite"))
    events = Events(database, "node", lambda: BEGAN)
    record_queue = RecordQueue(database, renew=lambda: run_figures.renew(database))
    filled(database)
    record_queue.enqueue("an event", lambda: events.record("checkpoint-verified", "text", "one", 1))

    def unchanged() -> bool:
        with database.read() as session:
            return session.scalar(select(RunChangeRow.id).limit(1)) is None

    wait_until(unchanged)
    with database.read() as session:
        assert len(session.scalars(select(RunFiguresRow.run)).all()) == 2
    record_queue.close()
    database.close()


def test_every_source_has_triggers() -> None:
    """The tables that figures are taken from are those that are watched."""
    tables = CatalogTable.metadata.tables
    assert all(run in tables[table].columns for table, run in changes.SOURCES.items())

"""Rows of all runs that are kept: whatever leaves an event or goes on is read anew, and nothing else is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import delete, event

from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.schema import AttemptRow, CheckpointRow, RunRow
from holdfast_service.control.database.visible import limited_to
from holdfast_service.control.insight.known_rows import AGAIN_S, WHOLE_S, KnownRows
from tests.control.published import a_row
from tests.databases import sqlite_url

BEGAN = "2030-01-01T00:00:00.000Z"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    for run in ("one", "two"):
        opened.declare_attempt(run, "launch", 1, BEGAN)
        opened.record_checkpoint(a_row(run, 1))
    yield opened
    opened.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rows(catalog: Catalog, clock: Clock) -> KnownRows:
    return KnownRows(catalog.database, fresh_s=-1.0, clock=clock)


def damage(catalog: Catalog, run: str) -> None:
    with catalog.database.write() as session:
        session.get_one(CheckpointRow, (run, 1)).damage = {"code": "corrupt-extent"}


def test_an_event_has_its_run_read_anew(catalog: Catalog, rows: KnownRows, clock: Clock) -> None:
    """For some seconds, since an event may come before what it tells of; runs without one are not asked about."""
    events = Events(catalog.database, "node", lambda: BEGAN)
    clock.now = WHOLE_S
    assert {run: found.held.damaged for run, found in rows.all().items()} == {"one": 0, "two": 0}
    clock.now += AGAIN_S + 1
    events.add("checkpoint-damaged", "as a check does", "one", 1)
    rows.all()
    damage(catalog, "one")
    damage(catalog, "two")
    clock.now += AGAIN_S / 2
    assert {run: found.held.damaged for run, found in rows.all().items()} == {"one": 1, "two": 0}
    clock.now += AGAIN_S
    asked: list[str] = []
    event.listen(catalog.database.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    rows.all()
    assert not [statement for statement in asked if "checkpoints" in statement]
    clock.now += WHOLE_S + 1
    assert rows.all()["two"].held.damaged == 1


def test_a_save_that_goes_on_is_followed(catalog: Catalog, rows: KnownRows, clock: Clock) -> None:
    """It has no event until it has ended."""
    clock.now = WHOLE_S
    rows.all()
    clock.now += AGAIN_S + 1
    catalog.note_round("two", 7, 1, 1, BEGAN)
    assert [(save.step, save.state) for save in rows.all()["two"].saves] == [(7, "open")]


def test_runs_come_and_go(catalog: Catalog, rows: KnownRows, clock: Clock) -> None:
    """Without an event of theirs, and whoever asks first."""
    with limited_to("one"):
        assert set(rows.all()) == {"one", "two"}
    clock.now += 1
    catalog.declare_attempt("three", "launch", 1, BEGAN)
    with catalog.database.write() as session:
        for table in (CheckpointRow, AttemptRow):
            session.execute(delete(table).where(table.run == "one"))
        session.execute(delete(RunRow).where(RunRow.name == "one"))
    assert set(rows.all()) == {"two", "three"}


def test_who_asks_at_once_is_given_the_same(catalog: Catalog, clock: Clock) -> None:
    """Many viewers cost what one does."""
    rows = KnownRows(catalog.database, fresh_s=1.0, clock=clock)
    first = rows.all()
    catalog.declare_attempt("three", "launch", 1, BEGAN)
    assert rows.all() is first
    clock.now += 1.1
    assert "three" in rows.all()

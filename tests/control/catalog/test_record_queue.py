"""control.catalog.record_queue: records are written a moment later, and at once when a query waits for them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from holdfast_service.control.catalog import record_queue as queues
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.visible import limited_to
from tests.daemons import wait_until


def test_who_tells_goes_on_first_and_who_waits_does_not_wait_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQL begins a moment after the first note, when the answer to the rank is out; a question ends that moment."""
    monkeypatch.setattr(queues, "LINGER_S", 600.0)
    record_queue = RecordQueue(Database.open(f"sqlite:///{tmp_path}/catalog.sqlite"))
    done: list[int] = []
    for question in (record_queue.flush, record_queue.recorded):
        wait_until(lambda: record_queue._thread is None or bool(record_queue._changed._waiters))  # type: ignore[attr-defined]  # idle again
        told = len(done)
        record_queue.enqueue("a number", lambda: done.append(len(done)))
        time.sleep(0.05)  # the catalog's thread has its turn
        record_queue.enqueue("another", lambda: done.append(len(done)))
        assert len(done) == told and record_queue.pending == 2
        assert question(60.0)
        assert len(done) == told + 2
    record_queue.close()
    record_queue.database.close()


def test_many_notes_are_told_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is before the first alone that the catalog's thread lingers."""
    monkeypatch.setattr(queues, "LINGER_S", 0.5)
    record_queue = RecordQueue(Database.open(f"sqlite:///{tmp_path}/catalog.sqlite"))
    done, ended = [], threading.Event()
    for number in range(1000):
        record_queue.enqueue("a number", lambda number=number: done.append(number))  # type: ignore[misc]
    record_queue.enqueue("the end", ended.set)
    assert ended.wait(180.0) and done == list(range(1000))
    record_queue.close()
    record_queue.database.close()


def test_what_is_decided_knows_all_runs_whoever_asks(tmp_path: Path) -> None:
    """A rank that says hello with a token for one run may be the first: the attempts of all runs are learned, not of that
    one alone, or a number would be given out twice (I6).
    """
    catalog = Catalog(Database.open(f"sqlite:///{tmp_path}/catalog.sqlite"))
    for run in ("mine", "theirs"):
        catalog.declare_attempt(run, "launch", 1, "2030-01-01T00:00:00Z")
    record_queue = RecordQueue(catalog.database)
    with limited_to("mine"):
        assert set(record_queue.query(catalog.declared, 60.0)) == {"mine", "theirs"}
        assert set(catalog.declared()) == {"mine"}
    record_queue.close()
    catalog.close()

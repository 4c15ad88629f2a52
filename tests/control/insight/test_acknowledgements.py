"""Acknowledgements: they hold for their alert and time, and an alert that occurs anew counts again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats.rest.measurements import Acknowledgement
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.database.visible import limited_to
from holdfast_service.control.insight.acknowledgements import Acknowledgements, AlertKey
from holdfast_service.wings.notify.acknowledgement_watch import AcknowledgementWatch
from tests.daemons import wait_until
from tests.databases import sqlite_url
from tests.kit.clock import Clock

NOW = "2030-01-01T00:00:00.000Z"
LATER = "2030-01-01T01:00:00.000Z"
DIED, FULL = AlertKey("a", "run-died"), AlertKey("b", "quota-nearly-full")
GONE = AlertKey("", "replica-lost", "far")


@pytest.fixture
def clock() -> Clock[str]:
    return Clock(NOW)


@pytest.fixture
def store(tmp_path: Path, clock: Clock[str]) -> Iterator[Acknowledgements]:
    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    yield Acknowledgements(catalog.database, clock)
    catalog.close()


def seen(until: str | None = None, by: str = "ann") -> Acknowledgement:
    return Acknowledgement(by=by, at=NOW, until=until)


def test_who_and_until_when_is_kept(store: Acknowledgements, clock: Clock[str]) -> None:
    """The last one that says it counts; what was only for a time is over then."""
    store.set(DIED, seen())
    store.set(DIED, seen(LATER, "bob"))
    store.set(GONE, seen())
    assert store.known() == {DIED: seen(LATER, "bob"), GONE: seen()}
    assert set(store.known(["b"])) == set()
    clock.now = LATER
    assert set(store.known()) == {GONE}
    store.remove([GONE, FULL])
    assert store.known() == {}


def test_a_request_sees_those_of_its_runs(store: Acknowledgements) -> None:
    """And none of nodes and replicas, unless it sees everything."""
    for key in (DIED, FULL, GONE):
        store.set(key, seen())
    with limited_to("a*"):
        assert set(store.known()) == {DIED}


def test_what_has_ended_and_occurs_anew_counts(store: Acknowledgements, clock: Clock[str]) -> None:
    """An acknowledgement goes when its alert is seen to be gone, or its time is over; nothing is asked where none is."""
    asked: list[set[str]] = []
    there = {DIED, GONE}

    def still(runs: object) -> set[AlertKey]:
        asked.append(set(runs))  # type: ignore[call-overload]
        return there

    store.forget_ended(still)
    assert asked == []
    for key in (DIED, FULL, GONE):
        store.set(key, seen(LATER if key == GONE else None))
    store.forget_ended(still)
    assert asked == [{"a", "b", ""}] and set(store.known()) == {DIED, GONE}
    there.discard(DIED)
    store.forget_ended(still)
    there.add(DIED)
    assert set(store.known()) == {GONE}
    clock.now = LATER
    store.forget_ended(still)
    clock.now = NOW
    assert store.known() == {}


def test_a_thread_looks_by_itself(store: Acknowledgements) -> None:
    """It goes on after a look that failed, and ends when it is told to."""
    store.set(DIED, seen())
    probe = iter([RuntimeError("once")])

    def still(runs: object) -> set[AlertKey]:
        for error in probe:
            raise error
        return set()

    watch = AcknowledgementWatch(store, still, look_s=0.01)
    try:
        wait_until(lambda: store.known() == {})
    finally:
        watch.close()


def test_a_snooze_of_a_clock_that_was_wrong_ends(store: Acknowledgements, clock: Clock[str]) -> None:
    """Snoozed for an hour while the clock was ten years ahead: set right, it would hide the alert for ten years."""
    made = Acknowledgement(by="ann", at="2040-01-01T00:00:00.000Z", until="2040-01-01T01:00:00.000Z")
    store.set(DIED, made)
    assert DIED not in store.known()
    store.forget_ended(lambda runs: {DIED})
    store.set(DIED, seen(LATER))
    assert set(store.known()) == {DIED}

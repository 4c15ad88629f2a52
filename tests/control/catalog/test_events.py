"""Events: what is kept of them, in which order they are read, and how they are waited for."""

from __future__ import annotations

import threading

import pytest

from holdfast_service.control.catalog import events as module
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database


@pytest.fixture
def events(database: Database) -> Events:
    return Events(database, "node-1", lambda: "2026-01-01T00:00:00Z")


def test_events_come_back_in_order_and_by_page(events: Events) -> None:
    """Forwards from an id and backwards by page, of one run or one kind."""
    for step in range(5):
        events.add("checkpoint-committed", f"step {step}", "a" if step % 2 else "b", step, bytes=step)
    assert [e.step for e in events.after(0, 10)] == [0, 1, 2, 3, 4]
    assert [e.step for e in events.after(events.after(0, 2)[-1].id, 10, run="b")] == [2, 4]
    first = events.newest(None, 2)
    assert [e.step for e in first.items] == [4, 3]
    assert [e.step for e in events.newest(first.next, 10).items] == [2, 1, 0]
    assert events.newest(None, 10, kind="save-aborted").items == []
    assert (first.items[0].node, first.items[0].detail, first.items[0].level) == ("node-1", {"bytes": 4}, "info")


def test_the_oldest_events_are_forgotten(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring holds the newest events, and ids go on where they were."""
    monkeypatch.setattr(module, "EVENTS_MAX", 10)
    monkeypatch.setattr(module, "TRIM_EVERY", 5)
    assert events.bounds() == (0, 0)
    for step in range(30):
        events.add("checkpoint-committed", f"step {step}", "a", step)
    assert events.bounds() == (21, 30)


def test_a_flood_pushes_out_nothing_but_itself(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token changes a mark of its run again and again: what is told of other runs, and of its saves, is still there.
    Whoever has not read what was forgotten is told so.
    """
    monkeypatch.setattr(module, "EVENTS_MAX", 20)
    monkeypatch.setattr(module, "TRIM_EVERY", 5)
    for step in range(4):
        events.add("checkpoint-committed", "it is", "a", step)
        events.add("checkpoint-committed", "it is", "b", step)
        events.add("daemon-started", "it is")
    for _ in range(200):
        events.add("mark-changed", "pinned", "a", 1)
    kept = events.after(0, 1000)
    assert len(kept) < 20 + 5
    saved = [(event.run, event.step) for event in kept if event.kind == "checkpoint-committed"]
    assert sorted(saved) == [(run, step) for run in "ab" for step in range(4)]
    assert [event.kind for event in kept].count("daemon-started") == 4
    flood = [event.id for event in kept if event.kind == "mark-changed"]
    assert flood == list(range(212 - len(flood) + 1, 213)), "its newest stay"
    assert events.following(10, 5, run="b").forgotten == 0
    assert events.following(10, 5, run="a").forgotten == flood[0] - 1


def test_ids_are_not_given_out_again(events: Events) -> None:
    """What a power cut may have taken back is skipped at the next start; an empty ring begins with 1."""
    events.skip_lost_ids()
    events.add("checkpoint-committed", "step 1", "a", 1)
    assert events.bounds() == (1, 1)
    events.skip_lost_ids()
    events.add("checkpoint-committed", "step 2", "a", 2)
    assert events.bounds()[1] > (1 + module.SKIPPED_IDS if events._database.engine.dialect.name == "sqlite" else 1)
    assert [event.step for event in events.following(1, 10).events] == [2]


def test_who_follows_misses_nothing(events: Events) -> None:
    """Several nodes add at once: who reads behind the last id that it saw gets every one, in order."""
    nodes = [Events(events._database, f"node-{n}", lambda: "2026-01-01T00:00:00Z") for n in range(4)]

    def add(node: Events) -> None:
        for step in range(25):
            node.add("checkpoint-committed", "it is", "a", step)

    adding = [threading.Thread(target=add, args=(node,)) for node in nodes]
    for thread in adding:
        thread.start()
    seen: list[int] = []
    position = 0
    while any(thread.is_alive() for thread in adding) or events.bounds()[1] > position:
        found = events.following(position, 1000)
        seen += [event.id for event in found.events]
        position = max(position, found.newest, *seen[-1:])
    assert seen == sorted(event.id for event in events.after(0, 1000)) and len(seen) == 100


def test_who_waits_is_woken(events: Events) -> None:
    """A wait ends with the next event, or says that there was none."""
    assert not events.wait(0.01)
    heard: list[bool] = []
    waiting = threading.Thread(target=lambda: heard.append(events.wait(180)))
    waiting.start()
    while waiting.is_alive():
        events.add("daemon-started", "a daemon serves")
        waiting.join(0.01)
    assert heard == [True]


def test_a_failing_catalog_fails_nothing(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    """What an event tells of has happened, recorded or not: the log has it then."""
    with events._database.write() as session:
        session.connection().exec_driver_sql("DROP TABLE events")
    events.add("checkpoint-committed", "step 1", "a", 1)
    assert "cannot record the event" in caplog.text


def test_what_is_recorded_once(events: Events) -> None:
    """The same of a step is no news, whoever tells it; other details are."""
    other = Events(events._database, "node-2", lambda: "2026-01-01T00:00:01Z")
    told = [
        one.record_once("commit-command-started", "it is", "a", step, attempt=attempt)
        for step, attempt in ((1, 1), (1, 2), (2, 1))
        for one in (events, other, events)
    ]
    assert told == [True, False, False] * 3
    assert [(e.step, e.detail["attempt"], e.node) for e in events.after(0, 9)] == [
        (1, 1, "node-1"),
        (1, 2, "node-1"),
        (2, 1, "node-1"),
    ]

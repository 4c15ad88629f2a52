"""The notifier over a real catalog and real receivers: once, over restarts and nodes, and never in anybody's way."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats.errors import CatalogUnavailable, InvalidRequest, NoSpace, NoSuchResource
from holdfast_formats.rest.measurements import Attention
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.database.database import Database
from holdfast_service.wings.notify import notifier, schedule
from holdfast_service.wings.notify.delivery_records import DeliveryRecords
from holdfast_service.wings.notify.notifier import DUTY, Notifier, NotifierContext
from holdfast_service.wings.notify.schedule import NoticeKey
from holdfast_service.wings.notify.target_state import TargetState
from tests.daemons import wait_until
from tests.databases import sqlite_database
from tests.wings.cluster.nodes import Nodes, nodes
from tests.wings.notify.receivers import Web, serving

__all__ = ["nodes"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SETTLED_S", 0.2)
    monkeypatch.setattr(notifier, "RETRY_S", 0.05)
    monkeypatch.setattr(notifier, "UNSURE_S", 0.0)


database = sqlite_database


@pytest.fixture
def web() -> Iterator[Web]:
    with serving(Web()) as server:
        yield server


class Daemon:
    """A daemon's notifier, and what it says needs attention."""

    def __init__(self, database: Database, path: Path, on_duty: Callable[[], bool] = lambda: True) -> None:
        self.alerts: dict[NoticeKey, Attention] = {}
        self.away = False
        self.probe = 0
        self.events = Events(database, "node-1", lambda: "2026-01-01T00:00:00Z")
        self.notices = DeliveryRecords(database, "node-1")
        self.notifier = Notifier(path, NotifierContext(self.notices, self._now, self.events, on_duty, "node-1"), look_s=0.05)

    def _now(self) -> dict[NoticeKey, Attention]:
        self.probe += 1
        if self.away:
            raise CatalogUnavailable("the catalog is away")
        return dict(self.alerts)

    def fire(self, *runs: str, level: Any = "error") -> None:
        self.alerts |= {
            NoticeKey(r, "run-died"): Attention(level=level, code="run-died", text="lost", hint="h") for r in runs
        }

    def look_twice(self) -> None:
        """Whatever is due by now has been seen."""
        before = self.probe
        wait_until(lambda: self.probe > before + 2)


@contextmanager
def daemon(database: Database, path: Path, on_duty: Callable[[], bool] = lambda: True) -> Iterator[Daemon]:
    made = Daemon(database, path, on_duty)
    try:
        yield made
    finally:
        made.notifier.close()


def targets(directory: Path, web: Web, **more: Any) -> Path:
    path = directory / "notify.toml"
    lines = {"name": "ops", "kind": "webhook", "url": f"{web.url}/hook", "after_s": 0, **more}
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in lines.items())
    path.write_text(f"[[target]]\n{text}\n")
    return path


def told(web: Web) -> list[tuple[str, str, str]]:
    """Status, run and id of every alert that was told."""
    return [(one["status"], one["run"], one["id"]) for got in web.got for one in json.loads(got.body)["alerts"]]


def kinds(one: Daemon) -> list[str]:
    """The events there are. One that tells of a message comes after it was noted that the message was accepted."""
    return [event.kind for event in one.events.after(0, 9)]


def runs(web: Web) -> list[tuple[str, str]]:
    return [(status, run) for status, run, _ in told(web)]


def test_an_alert_and_its_end(database: Database, web: Web, tmp_path: Path) -> None:
    with daemon(database, targets(tmp_path, web)) as one:
        one.fire("llama")
        wait_until(lambda: runs(web) == [("firing", "llama")])
        wait_until(lambda: one.notifier.targets()[0].sent == 1)
        one.look_twice()
        one.alerts.clear()
        wait_until(lambda: runs(web) == [("firing", "llama"), ("recovered", "llama")])
        wait_until(lambda: one.notifier.targets()[0].sent == 2)
        listed = one.notifier.targets()[0]
        assert (listed.firing, listed.failed, listed.dropped, listed.problem) == (0, 0, 0, None)
        assert len({alert for _, _, alert in told(web)}) == 1
        wait_until(lambda: kinds(one) == ["notification-sent"] * 2)


def test_a_daemon_that_is_started_again_goes_on(database: Database, web: Web, tmp_path: Path) -> None:
    """Nothing is told twice, and what ended meanwhile is told over."""
    path = targets(tmp_path, web)
    with daemon(database, path) as one:
        one.fire("llama", "gpt")
        wait_until(lambda: one.notifier.targets()[0].firing == 2)
    with daemon(database, path) as two:
        two.fire("gpt", "new")
        wait_until(lambda: ("firing", "new") in runs(web) and ("recovered", "llama") in runs(web))
        two.look_twice()
    assert sorted(runs(web)) == [("firing", "gpt"), ("firing", "llama"), ("firing", "new"), ("recovered", "llama")]


def test_a_daemon_that_has_just_started_knows_of_no_end(
    database: Database, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks may still come back to it: what it does not see yet is not over, and what it sees again is not new."""
    path = targets(tmp_path, web)
    with daemon(database, path) as one:
        one.fire("llama")
        wait_until(lambda: one.notifier.targets()[0].sent == 1)
    monkeypatch.setattr(notifier, "UNSURE_S", 3600.0)
    with daemon(database, path) as two:
        two.fire("gpt")
        wait_until(lambda: two.notifier.targets()[0].sent == 2)
        wait_until(lambda: two.probe > 10)
        two.fire("llama")
        two.look_twice()
    assert runs(web) == [("firing", "llama"), ("firing", "gpt")]


def test_a_receiver_that_is_away(database: Database, web: Web, tmp_path: Path) -> None:
    """It is told later, with the same id; one event tells of the failure, and what came and went meanwhile is counted."""
    web.status = 500
    with daemon(database, targets(tmp_path, web)) as one:
        one.fire("llama", "short")
        wait_until(lambda: one.notifier.targets()[0].failed >= 3)
        wait_until(lambda: "status 500" in (one.notifier.targets()[0].problem or ""))
        del one.alerts[NoticeKey("short", "run-died")]
        wait_until(lambda: one.notifier.targets()[0].dropped == 1)
        web.status = 200
        wait_until(lambda: one.notifier.targets()[0].sent == 1)
        listed = one.notifier.targets()[0]
        assert (listed.firing, listed.problem) == (1, None) and one.notifier.counts["dropped"] == 1
        assert len({alert for _, run, alert in told(web) if run == "llama"}) == 1
        wait_until(lambda: kinds(one) == ["notification-failed", "notification-sent"])
        assert web.url not in " ".join(event.text for event in one.events.after(0, 9))


def test_a_daemon_that_dies_before_it_notes_that_it_has_told(
    database: Database, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one tells it once more, under the same ids, so that who receives it can leave it out."""
    path = targets(tmp_path, web)
    with monkeypatch.context() as dying:

        def dies(*_: Any) -> None:
            raise CatalogUnavailable("it has died")

        dying.setattr(TargetState, "sent", dies)
        with daemon(database, path) as one:
            one.fire("llama")
            wait_until(lambda: len(web.got) > 0)
    before = len(web.got)
    with daemon(database, path) as two:
        two.fire("llama")
        wait_until(lambda: two.notifier.targets()[0].sent == 1)
        two.look_twice()
    assert len(web.got) == before + 1
    assert len({got.headers["webhook-id"] for got in web.got}) == 1 and len({alert for _, _, alert in told(web)}) == 1


def test_a_catalog_that_takes_nothing(database: Database, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: people are told, of what is new too, once and not at every look; it is noted when it can be."""
    with daemon(database, targets(tmp_path, web)) as one:
        one.fire("before")
        wait_until(lambda: one.notifier.targets()[0].sent == 1)
        with monkeypatch.context() as full:

            def refuse(*_: Any) -> None:
                raise NoSpace("the catalog: database or disk is full")

            for name in ("note", "tested", "failed"):
                full.setattr(DeliveryRecords, name, refuse)
            one.fire("llama")
            wait_until(lambda: len(web.got) == 2)
            one.look_twice()
            one.alerts.pop(NoticeKey("before", "run-died"))
            wait_until(lambda: len(web.got) == 3)
            one.look_twice()
            assert one.notifier.test("ops").delivered
            one.look_twice()
            assert len(web.got) == 4
        wait_until(lambda: (one.notifier.targets()[0].sent, one.notifier.targets()[0].firing) == (3, 1))
        one.look_twice()
    assert runs(web) == [("firing", "before"), ("firing", "llama"), ("recovered", "before")]


def test_whatever_fails_the_thread_of_a_target_goes_on(
    database: Database, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure that cannot be recorded, and a test message that is accepted: the rest is sent at once."""
    monkeypatch.setattr(notifier, "RETRY_S", 600.0)
    web.status = 500
    with daemon(database, targets(tmp_path, web)) as one:
        with monkeypatch.context() as broken:

            def break_(*_: Any) -> None:
                raise RuntimeError("nobody expected this")

            broken.setattr(DeliveryRecords, "failed", break_)
            one.fire("llama")
            wait_until(lambda: one.notifier.counts["failed"] == 1)
        web.status = 200
        one.look_twice()
        assert one.notifier.test("ops").delivered
        wait_until(lambda: ("firing", "llama") in runs(web)[1:])


def test_what_is_not_known_is_not_over(database: Database, web: Web, tmp_path: Path) -> None:
    """While the catalog is away nothing is told, and nothing recovers."""
    with daemon(database, targets(tmp_path, web)) as one:
        one.fire("llama")
        wait_until(lambda: one.notifier.targets()[0].sent == 1)
        one.away = True
        one.look_twice()
        one.away = False
        one.look_twice()
    assert runs(web) == [("firing", "llama")]


def test_a_slow_receiver_holds_up_nobody(database: Database, web: Web, tmp_path: Path) -> None:
    """Each target has its own thread."""
    path = targets(tmp_path, web)
    hold = threading.Event()

    class Slow(Web):
        def process_request(self, request: Any, client_address: Any) -> None:
            threading.Thread(target=self._later, args=(request, client_address), daemon=True).start()

        def _later(self, request: Any, client_address: Any) -> None:
            hold.wait(180)
            self.process_request_thread(request, client_address)

    with serving(Slow()) as slow:
        more = path.read_text().replace('"ops"', '"slow"').replace(web.url, slow.url)
        path.write_text(path.read_text() + more)
        with daemon(database, path) as one:
            one.fire("llama")
            wait_until(lambda: runs(web) == [("firing", "llama")])
            assert not slow.got
            hold.set()
            wait_until(lambda: runs(slow) == [("firing", "llama")])


def test_a_file_that_changes(database: Database, web: Web, tmp_path: Path) -> None:
    """It is taken over, unless it is wrong; a target that is no more is forgotten."""
    path = targets(tmp_path, web)
    with daemon(database, path) as one:
        one.fire("llama")
        wait_until(lambda: one.notifier.targets()[0].sent == 1)
        path.write_text("[[target")
        wait_until(lambda: any(event.kind == "notification-failed" for event in one.events.after(0, 9)))
        assert [target.name for target in one.notifier.targets()] == ["ops"]
        targets(tmp_path, web, name="chat", runs="gpt")
        wait_until(lambda: [target.name for target in one.notifier.targets()] == ["chat"])
        one.fire("gpt")
        wait_until(lambda: runs(web)[1:] == [("firing", "gpt")])
        wait_until(lambda: one.notices.known("ops") == {})
    with pytest.raises(InvalidRequest):
        targets(tmp_path, web, colour="red")
        Daemon(database, path)


def test_a_file_that_is_being_written(database: Database, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editor empties it first, and then all would be told again. A pipe in its place is no file, and holds up nobody."""
    path = targets(tmp_path, web)
    with daemon(database, path) as one:
        one.fire("llama")
        wait_until(lambda: one.notifier.targets()[0].sent == 1)
        with monkeypatch.context() as writing:
            writes = itertools.count()
            writing.setattr(notifier, "_stamp", lambda _: (next(writes), 0, 0))
            one.look_twice()
            whole = path.read_text()
            path.write_text("")
            one.look_twice()
            one.look_twice()
            path.write_text(whole)
        one.look_twice()
        path.unlink()
        os.mkfifo(path)
        wait_until(lambda: any("not a file" in event.text for event in one.events.after(0, 9)))
        one.look_twice()
        assert [target.name for target in one.notifier.targets()] == ["ops"]
    assert runs(web) == [("firing", "llama")]


def test_a_test_message(database: Database, web: Web, tmp_path: Path) -> None:
    with daemon(database, targets(tmp_path, web)) as one:
        assert one.notifier.test("ops").delivered
        assert json.loads(web.got[0].body)["kind"] == "test"
        web.status = 403
        failed = one.notifier.test("ops")
        assert not failed.delivered and "403" in (failed.problem or "") and failed.hint
        listed = one.notifier.targets()[0]
        assert (listed.sent, listed.failed, listed.firing) == (1, 1, 0)
        with pytest.raises(NoSuchResource):
            one.notifier.test("nobody")


def test_nodes_tell_once(nodes: Nodes, web: Web, tmp_path: Path) -> None:
    """The one that has the duty tells; when it is gone another one goes on, and says nothing again."""
    a, b = nodes.add("a"), nodes.add("b")
    path = targets(tmp_path, web)
    with daemon(a.database, path, lambda: a.duties.has(DUTY)) as one:
        one.fire("llama")
        wait_until(lambda: one.notifier.targets()[0].sent == 1)
        with daemon(b.database, path, lambda: b.duties.has(DUTY)) as two:
            two.fire("llama", "gpt")
            one.look_twice()
            assert two.probe == 0 and runs(web) == [("firing", "llama")]
            nodes.lapse(a)
            wait_until(lambda: runs(web) == [("firing", "llama"), ("firing", "gpt")])
            two.look_twice()
    assert runs(web) == [("firing", "llama"), ("firing", "gpt")]

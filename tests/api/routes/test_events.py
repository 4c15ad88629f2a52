"""Events over HTTP: a stream that goes on where it was left, says what it has lost, and never outlives the service."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.rest.api import Api
from holdfast.rest.jobs import RETRY_S
from holdfast_formats.errors import DaemonGone, DeadlineExceeded, InvalidRequest
from holdfast_formats.rest.operations import EVENTS, Event, Gap
from holdfast_service.api.access.authentication import Policy
from holdfast_service.api.content import event_wait
from holdfast_service.api.routes import events as module
from holdfast_service.control.catalog import events as ring
from holdfast_service.control.database.visible import limited_to
from tests.api.guarded import guarded
from tests.checkpoints import build_root
from tests.proxies import Proxy
from tests.serving import Served, served

STREAM = {"Accept": "text/event-stream"}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    build_root(tmp_path, {})
    with served(tmp_path) as running:
        yield running


@contextmanager
def stream(service: Served, last: int | None = None, **query: Any) -> Iterator[Iterator[dict[str, Any]]]:
    """The frames of a stream, each as its fields; a heartbeat has no data."""
    headers = STREAM | ({} if last is None else {"Last-Event-ID": str(last)})
    with (
        httpx.Client(base_url=service.url, trust_env=False, timeout=180) as client,
        client.stream("GET", "/v1/events", headers=headers, params=query) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _frames(answer.iter_lines())


def _frames(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    fields: dict[str, Any] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = json.loads(value) if name == "data" else value
        else:
            yield fields
            fields = {}


def take(frames: Iterator[dict[str, Any]], count: int) -> list[tuple[int, str]]:
    """The next events of a stream: id and kind."""
    found: list[tuple[int, str]] = []
    while len(found) < count:
        frame = next(frames)
        if "data" in frame:
            found.append((int(frame["id"]), frame["event"]))
    return found


def add(service: Served, count: int, run: str | None = "a", kind: str = "mark-changed") -> None:
    for _ in range(count):
        service.services.control.events.add(kind, "it was changed", run, 1)


def test_a_stream_tells_what_happens_from_now_on(service: Served) -> None:
    """Nothing from before, everything after, as JSON with its id; the first frame says where it begins."""
    add(service, 3)
    with stream(service) as frames:
        assert next(frames)["id"] == "3"
        add(service, 2, "b")
        first, second = next(frames), next(frames)
    assert (first["id"], first["event"], second["id"]) == ("4", "mark-changed", "5")
    assert Event.model_validate(first["data"]) == service.services.control.events.after(3, 1)[0]


def test_a_stream_goes_on_where_it_was_left(service: Served) -> None:
    """By Last-Event-ID, or by `after`, which it outranks: no event twice, none left out."""
    add(service, 10)
    with stream(service, last=4, after=1) as frames:
        assert [number for number, _ in take(frames, 6)] == [5, 6, 7, 8, 9, 10]
        add(service, 1)
        assert take(frames, 1) == [(11, "mark-changed")]
    with stream(service, after=9) as frames:
        assert [number for number, _ in take(frames, 2)] == [10, 11]


def test_long_backlogs_come_in_parts(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are read at once, all come in order."""
    monkeypatch.setattr(module, "READ_MAX", 3)
    add(service, 10)
    with stream(service, after=0) as frames:
        assert [number for number, _ in take(frames, 10)] == list(range(1, 11))


def test_filters(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one run or of one kind; what is passed over counts as read, so that it is no gap later."""
    add(service, 2, "a")
    add(service, 2, "b")
    add(service, 2, "b", "policy-changed")
    with stream(service, after=0, run="b", kind="policy-changed") as frames:
        assert take(frames, 2) == [(5, "policy-changed"), (6, "policy-changed")]
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    with stream(service, after=0, run="nobody") as frames:
        assert [next(frames)["id"] for _ in range(2)] == ["0", "6"]


def test_what_is_not_kept_any_more_is_said(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap names the oldest event that is kept, and the stream goes on with it."""
    monkeypatch.setattr(ring, "EVENTS_MAX", 4)
    monkeypatch.setattr(ring, "TRIM_EVERY", 2)
    add(service, 10)
    with stream(service, last=2) as frames:
        next(frames)
        gap = next(frames)
        assert (gap["event"], gap["id"], gap["data"]) == ("gap", "6", {"asked": 2, "oldest": 7})
        assert [number for number, _ in take(frames, 4)] == [7, 8, 9, 10]
    with stream(service, last=6) as frames:
        assert [number for number, _ in take(frames, 4)] == [7, 8, 9, 10]


def test_a_flood_of_others_repeats_nothing(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the flood much is forgotten, and of others all is kept: a stream tells of the gap, and goes on where it was."""
    monkeypatch.setattr(ring, "EVENTS_MAX", 8)
    monkeypatch.setattr(ring, "TRIM_EVERY", 2)
    add(service, 3, "quiet")
    add(service, 20, "loud")
    add(service, 1, "quiet")
    kept = [event.id for event in service.services.control.events.after(0, 100)]
    assert kept[:3] == [1, 2, 3] and kept[-1] == 24 and len(kept) < 11
    with stream(service, last=2) as frames:
        next(frames)
        gap = next(frames)
        assert (gap["event"], gap["data"]) == ("gap", {"asked": 2, "oldest": 3})
        assert [number for number, _ in take(frames, len(kept) - 2)] == kept[2:]
    with stream(service, last=10, run="loud") as frames:
        next(frames)
        assert next(frames)["event"] == "gap"
        assert [number for number, _ in take(frames, len(kept) - 4)] == kept[3:-1]
    events = module.EventStreams(service.services.control.events)
    frames, position, more = events._read(module.WantedEvents(None, None, "policy-changed"), 5)
    assert frames.count("event: gap") == 1 and not more
    assert events._read(module.WantedEvents(None, None, "policy-changed"), position)[0] == "", "told once"


def test_a_catalog_that_was_made_anew_is_a_gap(service: Served) -> None:
    """Ids begin again: who was further than any of them hears so, and gets all there are."""
    add(service, 2)
    with stream(service, last=500) as frames:
        next(frames)
        assert next(frames)["data"] == {"asked": 500, "oldest": 1}
        assert [number for number, _ in take(frames, 2)] == [1, 2]


def test_events_of_others_are_no_gap(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that are kept, nor those that are not: who may see some runs hears of a gap in their events alone."""
    monkeypatch.setattr(ring, "EVENTS_MAX", 4)
    monkeypatch.setattr(ring, "TRIM_EVERY", 2)
    events = service.services.control.events

    def told(position: int, pattern: str, run: str | None = None) -> tuple[bool, list[int]]:
        with limited_to(pattern):
            frames, *_ = module.EventStreams(events)._read(module.WantedEvents(None, run, None), position)
        return "event: gap" in frames, [int(at) for at in re.findall(r"id: (\d+)\nevent: mark", frames)]

    add(service, 3, "b")
    add(service, 1, "a")
    assert told(0, "a") == (False, [4]) and told(4, "a") == (False, [])
    add(service, 4, "b")
    assert [event.id for event in events.after(0, 10)] == [4, 6, 7, 8]
    assert told(3, "a") == (False, [4]) and told(2, "b") == (True, [6, 7, 8]) and told(5, "b") == (False, [6, 7, 8])
    add(service, 2, "a")
    assert [event.id for event in events.after(0, 10)] == [7, 8, 9, 10]
    assert told(4, "a") == told(4, "*", "a") == (False, [9, 10]), "what it had seen is gone, and it has seen all"
    assert told(3, "a") == (True, [9, 10]) and told(4, "a*") == (False, [9, 10])
    assert told(2, "a") == (True, [9, 10]) and told(2, "b") == (True, [7, 8])
    assert told(6, "*", "b") == (False, [7, 8]) and told(3, "*") == (True, [7, 8, 9, 10])
    assert told(8, "none") == (True, []) and told(0, "none") == (False, [])


def test_heartbeats(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream on which nothing happens says that it is alive, and where it stands."""
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    add(service, 1)
    with stream(service) as frames:
        beats = [next(frames) for _ in range(4)]
    assert [(beat["id"], "data" in beat) for beat in beats] == [("1", False)] * 4


def test_other_nodes_events_are_found(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells of them: the catalog is asked now and then."""
    monkeypatch.setattr(event_wait, "ASK_EVERY_S", 0.05)
    other = ring.Events(service.services.control.catalog.database, "node-2", lambda: "2030-01-01T00:00:00.000Z")
    with stream(service) as frames:
        next(frames)
        other.add("daemon-started", "another one serves")
        assert take(frames, 1) == [(1, "daemon-started")]


def test_many_streams_at_once_take_no_threads(service: Served) -> None:
    """Each hears of everything, and none of them keeps a thread waiting."""
    before = threading.active_count()
    count = module.STREAMS_MAX * 3 // 4  # the most of one peer
    opened = [stream(service) for _ in range(count)]
    frames = [one.__enter__() for one in opened]
    for one in frames:
        next(one)
    assert threading.active_count() <= before + 40  # the pool that asks the catalog has 40 at most
    add(service, 1)
    assert [take(one, 1) for one in frames] == [[(1, "mark-changed")]] * count
    for one in opened:
        one.__exit__(None, None, None)


def test_there_are_only_so_many_streams(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One too many is refused by name; when one ends, there is room again."""
    monkeypatch.setattr(module, "STREAM_WAIT_MAX_S", 0.05)
    service.app.state.event_streams = module.EventStreams(service.services.control.events, 1)
    with stream(service) as frames:
        next(frames)
        refused = httpx.get(f"{service.url}/v1/events", headers=STREAM, trust_env=False)
        assert (refused.status_code, refused.json()["code"]) == (504, DeadlineExceeded.code)
    monkeypatch.setattr(module, "STREAM_WAIT_MAX_S", 20)
    with stream(service) as frames:
        assert next(frames)["id"] == "0"


def test_one_reader_leaves_streams_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a token opens, another one finds some, and where readers have all that they may, an admin does."""
    monkeypatch.setattr(module, "STREAM_WAIT_MAX_S", 0.05)
    with guarded(tmp_path, Policy(tokens=True)) as guard, ExitStack() as held:
        guard.running.app.state.event_streams = module.EventStreams(guard.running.services.control.events, 8)
        client = held.enter_context(httpx.Client(base_url=guard.running.url, trust_env=False, timeout=180))

        def opened(token: str) -> int:
            headers = STREAM | {"Authorization": f"Bearer {token}"}
            answer = held.enter_context(client.stream("GET", "/v1/events", headers=headers))
            return answer.status_code

        one, other, admin = guard.token("read"), guard.token("read"), guard.token("admin")
        assert [opened(one) for _ in range(7)] == [200] * 6 + [504]
        assert [opened(other) for _ in range(2)] == [200, 504]
        assert [opened(admin) for _ in range(2)] == [200, 504]


def test_streams_end_when_the_service_does(tmp_path: Path) -> None:
    """An open stream, and who waits for a job, do not keep the service from ending; the stream ends whole."""
    build_root(tmp_path, {})
    with served(tmp_path) as running:
        client = httpx.Client(base_url=running.url, trust_env=False, timeout=180)
        with client.stream("GET", "/v1/events", headers=STREAM) as answer:
            frames = _frames(answer.iter_lines())
            next(frames)
            running.services.control.events.hang_up()
            assert list(frames) == []
    client.close()


def test_pages(service: Served) -> None:
    """Without asking for a stream: newest first, filtered, behind a cursor, back to `after`."""
    add(service, 3, "a")
    add(service, 2, "b", "policy-changed")
    with httpx.Client(base_url=service.url, trust_env=False) as http:
        first = http.get("/v1/events", params={"limit": 2}).json()
        assert [event["id"] for event in first["items"]] == [5, 4]
        second = http.get("/v1/events", params={"limit": 2, "cursor": first["next"]}).json()
        assert [event["id"] for event in second["items"]] == [3, 2]
        assert [event["id"] for event in http.get("/v1/events", params={"run": "a", "after": 1}).json()["items"]] == [3, 2]
        assert len(http.get("/v1/events", params={"kind": "policy-changed"}).json()["items"]) == 2


@pytest.mark.parametrize(
    ("query", "headers"),
    [({"kind": "nonsense"}, {}), ({"after": -1}, {}), ({}, STREAM | {"Last-Event-ID": "x"}), ({"after": 2**63}, STREAM)],
)
def test_nonsense_is_refused(service: Served, query: dict[str, Any], headers: dict[str, str]) -> None:
    """By name."""
    answer = httpx.get(f"{service.url}/v1/events", params=query, headers=headers, trust_env=False)
    assert (answer.status_code, answer.json()["code"]) == (400, InvalidRequest.code)


def test_the_client_mends_a_broken_stream(service: Served) -> None:
    """Its connection is cut again and again; every event comes once, in order."""
    proxy = Proxy(int(service.url.rpartition(":")[2]))
    try:
        with Api(proxy.url) as api:
            found: list[int] = []
            add(service, 5)
            for event in api.events(after=0):
                found.append(event.id)
                if event.id % 5 == 0:
                    if event.id == 25:
                        break
                    proxy.reset()
                    add(service, 5)
    finally:
        proxy.close()
    assert found == list(range(1, 26))


def test_the_client_hears_of_a_gap(service: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the service cannot tell any more it says, and the client goes on."""
    monkeypatch.setattr(ring, "EVENTS_MAX", 2)
    monkeypatch.setattr(ring, "TRIM_EVERY", 2)
    add(service, 6)
    gaps: list[Gap] = []
    with Api(service.url) as api:
        events = api.events(after=1, on_gap=gaps.append)
        assert [next(events).id for _ in range(2)] == [5, 6]
        events.close()
        with pytest.raises(InvalidRequest):
            next(api.events(kind="nonsense"))
    assert gaps == [Gap(asked=1, oldest=5)]


def test_the_client_loses_patience(service: Served) -> None:
    """With nobody there at all it raises at once; with a service that goes away, after a while."""
    with Api("http://127.0.0.1:9") as nobody, pytest.raises(DaemonGone):
        next(nobody.events())
    proxy = Proxy(int(service.url.rpartition(":")[2]))
    with Api(proxy.url) as api:
        add(service, 1)
        events = api.events(after=0, patience_s=RETRY_S[0])
        assert next(events).id == 1
        proxy.close()
        with pytest.raises(DaemonGone):
            next(events)


def test_the_document_lists_every_kind_of_event() -> None:
    """docs/api.md's table is exactly what the service may tell, and says of each what it means."""
    document = (Path(__file__).parents[3] / "docs" / "api.md").read_text()
    section = document.partition("## Events")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `([a-z-]+)` \| (.+) \|$", section, re.MULTILINE)) == EVENTS

"""Whatever answers at the address of a watched daemon: it is seen as unreachable in time, and nothing of it gets far."""

from __future__ import annotations

import base64
import gzip
import json
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from holdfast_service.api.app import RestApi
from holdfast_service.control.catalog.pages import INTEGER_MAX
from holdfast_service.wings.notify.running import Notifying
from holdfast_service.wings.notify.watched_daemons import bounded_answers, summary_client, watched
from holdfast_service.wings.notify.watched_daemons.watched import DaemonWatch
from tests.checkpoints import build_root
from tests.daemons import wait_until
from tests.serving import served
from tests.wings.notify.receivers import endless
from tests.wings.notify.watched_daemons.test_watched import closing_proxy, watching

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (HEAD + b"Content-Length: 1000000\r\n\r\n", b" "),
    ],
    ids=["head", "hints", "body"],
)
def test_an_answer_that_never_ends(begin: bytes, piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of it is quick. Such a daemon must not be shown as one that answers for as long as it likes."""
    monkeypatch.setattr(watched, "ANSWER_S", 0.5)
    with endless(begin, piece) as server, watching(server.url) as watch:
        wait_until(lambda: watch.daemons()[0].problem == "no reply in time")


@pytest.fixture
def lying(tmp_path: Path) -> Iterator[Callable[[Callable[[dict[str, Any]], None]], Any]]:
    build_root(tmp_path / "a", {"llama": (5,)})
    with served(tmp_path / "a") as a:
        healthy = {path: httpx.get(a.url + path, trust_env=False).content for path in ("/healthz", "/v1/nodes")}
        said = httpx.get(f"{a.url}/v1/summaries", trust_env=False).json()
        health = json.loads(healthy["/healthz"])

        @contextmanager
        def lies(change: Callable[[dict[str, Any]], None]) -> Iterator[DaemonWatch]:
            told = json.loads(json.dumps(said))
            about = {"summary": told["items"][0], "page": told, "health": dict(health)}
            change(about)
            answers = healthy | {"/healthz": json.dumps(about["health"]).encode()}
            with closing_proxy("") as proxy:
                proxy.answers = {**answers, "/v1/summaries": json.dumps(told).encode()}
                with watching(proxy.url) as watch:
                    yield watch

        yield lies


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", "../<script>alert(1)</script>"),
        ("run", "x" * 5000),
        ("last_commit", "yesterday"),
        ("last_commit", "2026-01-01" + "0" * 100),
        ("state_since", "<b>"),
        ("bytes", 10**400),
        ("exposed_s", float("nan")),
        ("exposed_s", float("inf")),
        ("newest", -(10**30)),
        ("life_since", "nonsense"),
        ("last_verified", "nonsense"),
        ("owner", "x" * 999),
        ("good", {"step": 1, "created": "nonsense", "verified": True, "copies": []}),
        ("good", {"step": 10**40, "created": "2030-01-01T00:00:00Z", "verified": True, "copies": []}),
        ("good", {"step": 1, "created": "2030-01-01T00:00:00Z", "verified": True, "copies": ["x" * 999]}),
        ("good", {"step": 1, "created": "2030-01-01T00:00:00Z", "verified": True, "copies": ["x"] * 1001}),
        ("copies", [{"tier": "x" * 999, "newest": 1, "damaged": 0}]),
        ("copies", [{"tier": "x", "newest": 10**40, "damaged": 0}]),
        ("trend", {"steps": [1] * 1001, "states": [], "stall_s": [], "goodput": []}),
        ("trend", {"steps": [10**30], "states": [], "stall_s": [], "goodput": []}),
        ("trend", {"steps": [1], "states": ["x" * 999], "stall_s": [1.0], "goodput": [1.0]}),
        ("attention", [{"level": "error", "code": "x", "text": "", "hint": "", "healthy": 10**4000}]),
        ("attention", [{"level": "error", "code": "x", "text": "", "hint": "", "subject": "x" * 999}]),
        ("attention", [{"level": "error", "code": "x", "text": "", "hint": "", "since": "nonsense"}]),
        (
            "attention",
            [{"level": "error", "code": "x", "text": "", "hint": "", "acknowledged": {"by": "x", "at": "nonsense"}}],
        ),
        ("attention", [{"level": "error", "code": "x" * 999, "text": "", "hint": ""}]),
        ("attention", [{"level": "error", "code": "x", "text": "", "hint": "", "step": 10**400}]),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_no_daemon_says_is_refused(lying: Any, name: str, value: Any) -> None:
    """A page that shows it would fail, or be as long as somebody elsewhere likes."""
    with lying(lambda about: about["summary"].__setitem__(name, value)) as watch:
        wait_until(lambda: "does not come from a Holdfast daemon" in (watch.daemons()[0].problem or ""))
        assert watch.runs() == []


def test_a_version_without_end(lying: Any) -> None:
    with lying(lambda about: about["health"].__setitem__("version", "9" * 1000)) as watch:
        wait_until(lambda: "does not come from a Holdfast daemon" in (watch.daemons()[0].problem or ""))


@pytest.mark.parametrize(
    "body",
    ['{"items": [%s{}]}', '{"items": [{"attention": [%s{}]}]}', '{"items": [%s1]}'],
    ids=["runs", "alerts", "numbers"],
)
def test_nonsense_is_not_explained(body: str) -> None:
    """A report of each mistake in some megabytes would take all memory; this process would be killed, and this test."""
    with closing_proxy("") as proxy:
        nothing = body % ("{}," * (summary_client.ANSWER_BYTES_MAX // 3 - 100))
        proxy.answers = {"/healthz": b"{}", "/v1/nodes": b'{"items": []}', "/v1/summaries": nothing.encode()}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with watching(proxy.url) as watch:
            wait_until(lambda: "does not come from a Holdfast daemon" in (watch.daemons()[0].problem or ""))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024  # KiB


def test_a_page_that_leads_to_itself(lying: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lists is bounded, and so is the time."""
    monkeypatch.setattr(watched, "ANSWER_S", 0.5)
    monkeypatch.setattr(summary_client, "RUNS_MAX", 3)
    with lying(lambda about: about["page"].__setitem__("next", "again")) as watch:
        wait_until(lambda: len(watch.runs()) == 3)


def test_words_of_others_are_no_markup_and_have_a_length(lying: Any, tmp_path: Path) -> None:
    """On the page for people, too; errors are there whatever else is said."""
    script = "<script>alert(1)</script> `<img src=x onerror=alert(1)>` "
    many = [{"level": "warning", "code": f"w{n}", "text": script * 40, "hint": ""} for n in range(60)]

    def change(about: dict[str, Any]) -> None:
        about["summary"]["attention"] = [*many, {"level": "error", "code": "e", "text": script, "hint": ""}]

    with lying(change) as watch:
        wait_until(lambda: len(watch.runs()) == 1)
        attention = watch.runs()[0].summary.attention
        assert (len(attention), attention[0].code) == (summary_client.ATTENTION_MAX, "e")
        assert max(len(item.text) for item in attention) == bounded_answers.TEXT_MAX
        build_root(tmp_path / "own", {"gpt": (1,)})
        with served(tmp_path / "own") as own:
            app = RestApi(own.services, {"notify": Notifying(watched=watch)})
            with TestClient(app, base_url="http://localhost") as client:
                page = client.get("/daemons")
                assert page.status_code == 200 and "&lt;script&gt;alert" in page.text
                assert "<script>alert" not in page.text and "<img src=x" not in page.text
                far = client.get(
                    "/v1/watched/runs",
                    params={"cursor": base64.urlsafe_b64encode(f"watched:{INTEGER_MAX}".encode()).decode()},
                )
                assert (far.status_code, far.json()["items"]) == (200, [])


def test_a_compressed_answer_is_refused() -> None:
    """A few bytes would become gigabytes."""
    with closing_proxy("") as proxy, watching(proxy.url) as watch:
        proxy.answer = (200, {"Content-Encoding": "gzip"}, gzip.compress(b" " * 1000))
        wait_until(lambda: "compressed" in (watch.daemons()[0].problem or ""))


def test_a_daemon_that_says_too_much_takes_bounded_memory(lying: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take more memory than one daemon may is not kept; the runs that come first are."""
    monkeypatch.setattr(summary_client, "REPORT_BYTES_MAX", 50_000)

    def change(about: dict[str, Any]) -> None:
        about["summary"]["verdict"] = "v" * 200_000
        about["page"]["items"] = [about["summary"] | {"run": f"run-{number:03}"} for number in range(20)]

    with lying(change) as watch:
        wait_until(lambda: bool(watch.runs()))
        runs = watch.runs()
        assert 1 < len(runs) < 20 and [one.summary.run for one in runs] == [f"run-{n:03}" for n in range(len(runs))]
        assert {len(one.summary.verdict) for one in runs} == {bounded_answers.TEXT_MAX}
        assert watch.daemons()[0].reachable

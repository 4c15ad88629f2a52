"""Alerts over HTTP: what is listed, to whom, and who has acknowledged what."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from holdfast_formats import naming
from holdfast_formats.rest import bodies
from holdfast_service.control.database import engines
from holdfast_service.control.insight.facts import RunActivity
from holdfast_service.wings.notify.routes.alerts import TAKEN_BACK
from tests.checkpoints import build_root
from tests.daemons import wait_until
from tests.serving import Served, served

AT = "2026-01-02T00:00:00Z"
DIED = "/v1/runs/tiny/alerts/run-died/acknowledgement"


@pytest.fixture
def lives() -> dict[str, RunActivity]:
    return {"tiny": RunActivity("died", AT), "other": RunActivity("running")}


@pytest.fixture
def service(tmp_path: Path, lives: dict[str, RunActivity]) -> Iterator[Served]:
    """A run that died, one that trains, and a replica that cannot be reached."""
    build_root(tmp_path / "root", {"tiny": (5, 10), "other": (1,)})

    def node() -> bodies.Node:
        told = {"name": "node-1", "version": "9", "socket": None, "started": "now", "arena_bytes": 0, "ranks": 0}
        return bodies.Node.model_validate({**told, "replicas": {"far": "its disk is gone"}})

    tried: list[str] = []
    copies = {"far": lambda: not tried.append("far"), "theirs": lambda: False}
    with served(tmp_path / "root", lives=lambda runs: lives, node=node, replicas=copies) as running:
        yield running


def listed(http: httpx.Client, **query: object) -> list[tuple[str | None, str]]:
    items = http.get("/v1/alerts", params=query).raise_for_status().json()["items"]
    return [(one["run"] or one["subject"], one["code"]) for one in items]


def test_alerts_say_what_mends_them(http: httpx.Client) -> None:
    """Of runs, and of replicas; page by page."""
    assert listed(http) == [("tiny", "run-died"), ("far", "replica-lost")]
    first = http.get("/v1/alerts?limit=1").json()
    behind = http.get("/v1/alerts", params={"cursor": first["next"]}).json()
    assert (first["items"][0]["remedy"], first["items"][0]["since"]) == ("resume", AT)
    assert (behind["items"][0]["code"], behind["next"]) == ("replica-lost", None)
    found = http.get("/v1/overview").json()
    assert (found["states"], found["errors"], found["newest_died"]) == ({"died": 1, "training": 1}, 2, "tiny")
    assert http.get("/v1/alerts?cursor=x").status_code == 400


def test_what_is_acknowledged_is_listed_and_counts_no_more(http: httpx.Client) -> None:
    """With who and until when; taken back, it counts again."""
    made = http.put(DIED, json={"for_s": 60}).json()
    assert made["by"] and made["until"] > made["at"]
    assert listed(http, acknowledged=False) == [("far", "replica-lost")]
    assert listed(http, acknowledged=True) == [("tiny", "run-died")]
    assert http.get("/v1/runs/tiny/summary").json()["attention"][0]["acknowledged"]["by"] == made["by"]
    assert http.get("/v1/overview").json()["acknowledged"] == 1
    assert http.put("/v1/alerts/replica-lost/far/acknowledgement", json={}).json()["until"] is None
    assert listed(http, acknowledged=False) == []
    assert http.delete(DIED).status_code == 204
    assert listed(http, acknowledged=False) == [("tiny", "run-died")]
    assert http.delete(DIED).status_code == 404
    events = http.get("/v1/events").json()["items"]
    assert any(TAKEN_BACK in event["text"] for event in events)
    kinds = [event["kind"] for event in events]
    assert kinds.count("alert-acknowledged") == 3


def death(http: httpx.Client) -> tuple[str, bool, list[str]]:
    """As the run says it, as `about` does, and what of it counts."""
    about = http.get("/v1/runs/tiny/about").raise_for_status().json()
    assert about["life"] == http.get("/v1/runs/tiny").json()["life"] == http.get("/v1/runs/tiny/summary").json()["life"]
    board = {one["run"]: one["life"] for one in http.get("/v1/summaries?sort=attention").json()["items"]}
    assert about["life"] == board["tiny"]
    return about["life"], about["acknowledged"], [code for run, code in listed(http, acknowledged=False) if run == "tiny"]


def test_a_death_is_dealt_with_by_its_run_or_by_its_alert(http: httpx.Client) -> None:
    """Either is the other; who saw it first stays, and what is taken back leaves nothing behind, not even a snooze."""
    died, seen = ("died", False, ["run-died"]), ("idle", True, [])
    assert death(http) == died
    made = http.put(DIED, json={}).raise_for_status().json()
    assert made["until"] is None and death(http) == seen
    assert http.get("/v1/overview").json()["newest_died"] is None
    about = http.patch("/v1/runs/tiny", json={"acknowledged": True}).raise_for_status().json()
    assert (about["acknowledged_by"], about["acknowledged_at"]) == (made["by"], made["at"])
    assert http.patch("/v1/runs/tiny", json={"acknowledged": False}).json()["acknowledged_by"] is None
    assert death(http) == died
    http.put(DIED, json={"for_s": 60}).raise_for_status()
    assert death(http) == ("died", False, [])
    http.patch("/v1/runs/tiny", json={"acknowledged": True}).raise_for_status()
    assert death(http) == seen and listed(http, acknowledged=True) == [("tiny", "run-died")]
    assert http.get("/v1/runs/tiny/summary").json()["attention"][0]["acknowledged"]["until"] is None
    assert http.delete(DIED).status_code == 204 and death(http) == died
    assert http.delete(DIED).json()["code"] == "no-such-resource"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/runs/other/alerts/run-died/acknowledgement", {}, 404),
        ("/v1/runs/nope/alerts/run-died/acknowledgement", {}, 404),
        ("/v1/alerts/replica-lost/near/acknowledgement", {}, 404),
        (DIED, {"for_s": -1}, 400),
        (DIED, {"for_s": 1e9}, 400),
        (DIED, {"for": 60}, 400),
    ],
)
def test_what_is_no_alert_cannot_be_acknowledged(http: httpx.Client, path: str, body: dict, status: int) -> None:
    """Nor for a time that is none."""
    assert http.put(path, json=body).status_code == status


def test_a_replica_is_copied_to_again(http: httpx.Client) -> None:
    """Where this daemon copies to it; otherwise it says who is to be asked."""
    assert http.post("/v1/replicas/far/retry").status_code == 204
    assert http.post("/v1/replicas/theirs/retry").json()["code"] == "in-use"
    assert http.post("/v1/replicas/nowhere/retry").status_code == 404


@pytest.mark.parametrize("how", ["PUT", "PATCH"])
def test_a_death_is_not_half_acknowledged(
    http: httpx.Client, service: Served, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """In the run's file and not in the catalog: while that is locked it is refused, and nothing was changed."""
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_S", 0.05)
    service.services.control.catalog.database.engine.dispose()  # a connection keeps the timeout with which it was opened
    assert http.put(DIED, json={"for_s": 3600}).status_code == 200
    with closing(sqlite3.connect(service.root / naming.CATALOG, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        asked = (DIED, {}) if how == "PUT" else ("/v1/runs/tiny", {"acknowledged": True})
        assert http.request(how, asked[0], json=asked[1]).status_code == 503
    wait_until(lambda: http.get("/v1/runs/tiny/about").status_code == 200)
    assert not http.get("/v1/runs/tiny/about").json()["acknowledged"]
    (item,) = http.get("/v1/alerts?acknowledged=true").json()["items"]
    assert item["acknowledged"]["until"] is not None

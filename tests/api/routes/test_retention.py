"""The routes of retention: If-Match, previews, marks, removal, and readers that hold what they read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update

from holdfast_formats import naming
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.readers import LINGER_S
from holdfast_service.control.database.schema import CheckpointRow
from tests.checkpoints import build, build_root
from tests.control.published import mark_verified
from tests.serving import Served, served

TINY = "/v1/runs/tiny"
POLICY = f"{TINY}/policy"
LARGE_BYTES = 24 * 2**20


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    """A run of four checkpoints, all but the newest verified."""
    build_root(tmp_path, {"tiny": (5, 10, 15, 20)})
    with served(tmp_path) as running:
        for step in (5, 10, 15):
            mark_verified(running.services.control.catalog, "tiny", step)
        yield running


def steps(http: httpx.Client) -> list[int]:
    return [made["step"] for made in http.get(f"{TINY}/checkpoints").json()["items"]]


def make_unhealthy(service: Served, *wanted: int) -> None:
    with service.services.control.catalog.database.write() as session:
        session.execute(update(CheckpointRow).where(CheckpointRow.step.in_(wanted)).values(healthy=False))


def test_a_policy_is_changed_with_if_match(service: Served, http: httpx.Client) -> None:
    """428 without the validator, 412 with a stale one, and the new one with the change; a refused change changes nothing."""
    read = http.get(POLICY)
    tag = read.headers["etag"]
    assert read.json()["last"] is None
    assert http.get(POLICY, headers={"If-None-Match": tag}).status_code == 304
    refused = http.put(POLICY, json={"last": 1})
    assert (refused.status_code, refused.json()["code"]) == (428, "precondition-required")
    changed = http.put(POLICY, json={"last": 2}, headers={"If-Match": tag})
    assert changed.status_code == 200
    assert [(v["step"], v["keep"]) for v in changed.json()["verdicts"]] == [(20, True), (15, True), (10, True), (5, False)]
    stale = http.put(POLICY, json={"last": 1}, headers={"If-Match": tag})
    assert (stale.status_code, stale.json()["code"], stale.json()["etag"]) == (
        412,
        "precondition-failed",
        changed.headers["etag"],
    )
    assert http.get(POLICY).json()["last"] == 2
    assert http.get(POLICY).headers["etag"] == changed.headers["etag"]
    assert service.services.control.rotation.wait_until_applied()
    assert steps(http) == [20, 15, 10]


@pytest.mark.parametrize(
    "body", [{"last": 0}, {"last": "3"}, {"newest": 3}, {"every_seconds": -1}, {"best": [{"metric": "", "count": 1}]}, []]
)
def test_a_wrong_policy_is_refused(http: httpx.Client, body: object) -> None:
    """What is no policy is an invalid request, and changes nothing."""
    refused = http.put(POLICY, json=body, headers={"If-Match": "*"})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid-request")
    assert http.get(POLICY).json()["last"] is None


def test_previews_change_nothing(service: Served, http: httpx.Client) -> None:
    """`dry_run` needs no If-Match but heeds one; the preview of the policy in force is a resource of its own."""
    seen = http.put(POLICY, params={"dry_run": "true"}, json={"every_steps": 10}).json()
    assert {v["step"]: v["keep"] for v in seen["verdicts"]} == {20: True, 15: True, 10: True, 5: False}
    assert seen["verdicts"][3]["reasons"] == ["every 10 steps: 5 is not a multiple of 10"]
    assert seen["bytes_removed"] > 0
    stale = http.put(POLICY, params={"dry_run": "true"}, json={"last": 1}, headers={"If-Match": '"old"'})
    assert stale.status_code == 412
    assert service.services.control.rotation.wait_until_applied()
    assert steps(http) == [20, 15, 10, 5]
    assert all(v["keep"] for v in http.get(f"{TINY}/retention").json()["verdicts"])
    for path in ("/v1/runs/nope/policy", "/v1/runs/nope/retention"):
        assert http.get(path).json()["code"] == "no-such-run"


def test_pins_and_labels(http: httpx.Client) -> None:
    """Setting and taking away may be repeated; what is not there cannot be marked, and a mark keeps what it is on."""
    for path in (f"{TINY}/checkpoints/5/pin", f"{TINY}/checkpoints/10/labels/best.v1"):
        for _ in range(2):
            assert http.put(path).status_code == 204
    shown = {v["step"]: (v["pinned"], v["labels"]) for v in http.get(f"{TINY}/retention").json()["verdicts"]}
    assert shown == {20: (False, []), 15: (False, []), 10: (False, ["best.v1"]), 5: (True, [])}
    for step in (5, 10):
        refused = http.delete(f"{TINY}/checkpoints/{step}")
        assert (refused.status_code, refused.json()["code"]) == (409, "pinned")
    for path in (f"{TINY}/checkpoints/5/pin", f"{TINY}/checkpoints/10/labels/best.v1"):
        for _ in range(2):
            assert http.delete(path).status_code == 204
    for step in (5, 10):
        assert http.delete(f"{TINY}/checkpoints/{step}").status_code == 204
    assert http.put(f"{TINY}/checkpoints/5/pin").json()["code"] == "no-such-checkpoint"
    assert http.put(f"{TINY}/checkpoints/15/labels/a%20b").json()["code"] == "invalid-request"


def test_the_newest_verified_is_removed_only_by_name(http: httpx.Client) -> None:
    """409 without `force`, which has one value; with `dry_run` it is told and not done."""
    path = f"{TINY}/checkpoints/15"
    refused = http.delete(path)
    assert (refused.status_code, refused.json()["code"]) == (409, "newest-verified")
    assert http.delete(path, params={"force": "yes"}).status_code == 400
    told = http.delete(path, params={"force": "newest-verified", "dry_run": "true"})
    assert (told.status_code, told.json()["step"]) == (200, 15)
    assert steps(http) == [20, 15, 10, 5]
    assert http.delete(path, params={"force": "newest-verified"}).status_code == 204
    assert steps(http) == [20, 10, 5]


def test_the_newest_healthy_is_removed_only_by_name(service: Served, http: httpx.Client) -> None:
    """409 where what is newer is unhealthy; forcing the newest verified one is not forcing this one."""
    make_unhealthy(service, 15)
    path = f"{TINY}/checkpoints/10"
    for params in ({}, {"force": "newest-verified"}):
        refused = http.delete(path, params=params)
        assert (refused.status_code, refused.json()["code"]) == (409, "newest-healthy")
        assert "--force newest-healthy" in refused.json()["hint"]
    told = http.delete(path, params={"force": "newest-healthy", "dry_run": "true"})
    assert (told.status_code, told.json()["step"]) == (200, 10)
    assert steps(http) == [20, 15, 10, 5]
    assert http.delete(path, params={"force": "newest-healthy"}).status_code == 204
    assert steps(http) == [20, 15, 5]


def test_who_reads_over_http_holds(service: Served, http: httpx.Client) -> None:
    """While a file is sent, and a while after it, its checkpoint is not removed; looking at its entry holds nothing."""
    assert http.get(f"{TINY}/checkpoints/5").status_code == 200
    assert service.services.control.rotation.readers.held("tiny") == {}
    assert http.get(f"{TINY}/checkpoints/15/shard").status_code == 200
    assert set(service.services.control.rotation.readers.held("tiny")) == {15}
    name = http.get(f"{TINY}/checkpoints/10/files").json()["items"][-1]["name"]
    assert http.get(f"{TINY}/checkpoints/10/files/{name}", headers={"Range": "bytes=0-3"}).status_code == 206
    assert set(service.services.control.rotation.readers.held("tiny")) == {10, 15}
    refused = http.delete(f"{TINY}/checkpoints/10")
    assert (refused.status_code, refused.json()["code"]) == (409, "in-use")
    assert 0 < refused.json()["seconds"] <= 60
    http.put(POLICY, json={"last": 1}, headers={"If-Match": "*"})
    assert service.services.control.rotation.wait_until_applied()
    assert steps(http) == [20, 15, 10]
    service.services.control.rotation.readers.release("tiny", 10, "HTTP")
    assert service.services.control.rotation.wait_until_applied()
    assert steps(http) == [20, 15]


def test_a_slow_download_is_not_cut_off(service: Served) -> None:
    """A reader that takes its time gets every byte though the policy would have let the checkpoint go meanwhile."""
    large = {"model": {"w": np.arange(LARGE_BYTES, dtype=np.uint8)}}  # more than the sockets between the two hold
    wanted = build(service.root / naming.checkpoint_path("tiny", 1), large, step=1, aliases={}).path / "model.safetensors"
    rotation = service.services.control.rotation
    roots.reconcile(service.services.control.store, service.services.control.catalog)
    with httpx.stream("GET", f"{service.url}{TINY}/checkpoints/1/files/model.safetensors", trust_env=False) as answer:
        assert rotation.readers.held("tiny")[1] > LINGER_S
        httpx.put(f"{service.url}{POLICY}", json={"last": 1}, headers={"If-Match": "*"}, trust_env=False).raise_for_status()
        assert rotation.wait_until_applied()
        assert b"".join(answer.iter_bytes()) == wanted.read_bytes()
    deadline = time.monotonic() + 180
    while rotation.readers.held("tiny")[1] > LINGER_S:  # the server has still to see that all has gone out
        assert time.monotonic() < deadline
        time.sleep(0.01)
    rotation.readers.release("tiny", 1, "HTTP")
    assert rotation.wait_until_applied()
    assert not wanted.exists()


def test_what_is_being_removed_is_not_there(service: Served, http: httpx.Client) -> None:
    """Who asks for a file of a checkpoint that is on its way out is told that there is none."""
    with service.services.control.rotation.readers.removing("tiny", 5) as free:
        assert free
        got = http.get(f"{TINY}/checkpoints/5/manifest")
    assert (got.status_code, got.json()["code"]) == (404, "no-such-checkpoint")


def test_metrics_count_removals_and_refusals(service: Served, http: httpx.Client) -> None:
    """Refusals for want of room are there before the first one; what was removed is counted by why."""
    catalog = service.services.control.catalog
    catalog.rounds.end(catalog.rounds.open("tiny", 30, 1, 1, "now")[0], "aborted", "now", "quota-exceeded", "no room")
    http.delete(f"{TINY}/checkpoints/5")
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    failed = {sample.labels["code"]: sample.value for sample in families["holdfast_rounds_failed"].samples}
    assert (failed["no-space"], failed["quota-exceeded"]) == (0, 1)
    removed = {sample.labels["why"]: sample.value for sample in families["holdfast_checkpoints_removed"].samples}
    assert removed == {"retention": 0, "request": 1, "space": 0, "replaced": 0}

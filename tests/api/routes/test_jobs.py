"""The routes of jobs, over a real service that really verifies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast_formats import naming
from tests.checkpoints import build_root
from tests.serving import Served, hold_up, served

VERIFY = {"kind": "verify", "run": "tiny", "step": 5}
EXPORT = {"kind": "export", "run": "tiny", "step": 5, "arguments": {"to": "there"}}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Served]:
    build_root(tmp_path, {"tiny": (5, 10)})
    with served(tmp_path) as running:
        yield running


def ended(http: httpx.Client, location: str) -> dict[str, Any]:
    """The job once it has ended, awaited by long polls."""
    while (job := http.get(location, params={"wait_s": 20}).raise_for_status().json())["state"] in ("queued", "running"):
        pass
    return job


def test_a_checkpoint_is_verified(http: httpx.Client, service: Served) -> None:
    """202 with Location; then the job says what was read, the checkpoint is verified, and an event tells of it."""
    answer = http.post("/v1/jobs", json=VERIFY)
    assert (answer.status_code, answer.json()["state"], answer.json()["run"]) == (202, "queued", "tiny")
    job = ended(http, answer.headers["location"])
    checkpoint = http.get("/v1/runs/tiny/checkpoints/5").json()
    assert checkpoint["verified"]
    assert (job["state"], job["problem"]) == ("done", None)
    assert {name: job["result"][name] for name in ("bytes", "files", "tensors")} == {
        name: checkpoint[name] for name in ("bytes", "files", "tensors")
    }
    assert job["done_bytes"] == job["total_bytes"] == checkpoint["bytes"] and job["result"]["seconds"] > 0
    kinds = [event.kind for event in service.services.control.events.after(0, 10, run="tiny")]
    assert kinds[0] == "checkpoint-verified"


@pytest.mark.parametrize("kind", ["verify", "compare", "export", "import", "merge"])
def test_a_checkpoint_named_in_the_arguments_is_refused(http: httpx.Client, kind: str) -> None:
    """Run and step are members of the request; nobody reads them elsewhere."""
    said = {"run": "tiny", "step": 5, "with": "10", "to": "/tmp/x", "from": "/tmp/x", "recipe": {}}
    answer = http.post("/v1/jobs", json={"kind": kind, "arguments": said})
    assert answer.status_code == 400 and "needs 'run'" in answer.json()["detail"]


def test_damage_is_named_and_a_repair_that_cannot_be_fails(http: httpx.Client, service: Served) -> None:
    """A flipped byte is named: file and bytes, and the checkpoint is not called sound."""
    file = sorted((service.root / naming.checkpoint_path("tiny", 5)).glob("model*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    job = ended(http, http.post("/v1/jobs", json=VERIFY).headers["location"])
    assert (job["state"], job["problem"]["code"], job["problem"]["file"]) == ("failed", "corrupt-extent", file.name)
    assert http.get("/v1/runs/tiny/checkpoints/5").json()["damage"]["file"] == file.name
    repair = {**VERIFY, "arguments": {"repair": True}}
    job = ended(http, http.post("/v1/jobs", json=repair).headers["location"])
    assert (job["state"], job["problem"]["file"]) == ("failed", file.name)  # nobody has these bytes


def test_the_same_request_is_the_same_job(http: httpx.Client, service: Served) -> None:
    """200 and the same Location while it goes on; 202 while it is asked to stop, 204 once it has."""
    hold_up(service)
    first = http.post("/v1/jobs", json=EXPORT)
    second = http.post("/v1/jobs", json=EXPORT)
    assert (first.status_code, second.status_code) == (202, 200)
    assert first.headers["location"] == second.headers["location"]
    location = first.headers["location"]
    while http.get(location).json()["state"] == "queued":
        pass
    assert http.delete(location).status_code == 202
    assert ended(http, location)["state"] == "cancelled"
    assert http.delete(location).status_code == 204
    assert http.post("/v1/jobs", json=EXPORT).headers["location"] != location


def test_a_job_is_read_again_only_when_it_has_changed(http: httpx.Client, service: Served) -> None:
    """Its ETag answers 304; a long poll that names it ends with the next change."""
    hold_up(service)
    location = http.post("/v1/jobs", json=EXPORT).headers["location"]
    while (running := http.get(location)).json()["done_bytes"] == 0:
        pass
    tag = {"If-None-Match": running.headers["etag"]}
    assert http.get(location, headers=tag).status_code == 304
    http.delete(location)
    changed = http.get(location, headers=tag, params={"wait_s": 20})
    assert (changed.status_code, changed.json()["state"]) == (200, "cancelled")
    after = http.get(location, headers={"If-None-Match": changed.headers["etag"]}, params={"wait_s": 20})
    assert after.status_code == 304


def test_jobs_are_listed(http: httpx.Client) -> None:
    """Newest first, filtered, in pages."""
    locations = [http.post("/v1/jobs", json={**VERIFY, "step": step}).headers["location"] for step in (5, 10)]
    for location in locations:
        ended(http, location)
    page = http.get("/v1/jobs", params={"limit": 1}).json()
    assert [job["step"] for job in page["items"]] == [10]
    assert [job["step"] for job in http.get("/v1/jobs", params={"cursor": page["next"]}).json()["items"]] == [5]
    assert http.get("/v1/jobs", params={"kind": "verify", "state": "done", "run": "tiny"}).json()["next"] is None
    assert http.get("/v1/jobs", params={"state": "failed"}).json()["items"] == []


@pytest.mark.parametrize(
    ("wanted", "status", "code"),
    [
        ({"kind": "fold"}, 400, "invalid-request"),
        ({"kind": "verify"}, 400, "invalid-request"),
        ({"kind": "verify", "run": "tiny"}, 400, "invalid-request"),
        ({"kind": "verify", "run": "tiny", "step": -1}, 400, "invalid-request"),
        ({"kind": "verify", "run": "tiny", "step": 5, "bogus": 1}, 400, "invalid-request"),
        ({"kind": "verify", "run": "tiny", "step": 6}, 404, "no-such-checkpoint"),
        ({"kind": "verify", "run": "nope", "step": 6}, 404, "no-such-run"),
        ({"kind": "verify", "run": "../etc", "step": 6}, 400, "invalid-request"),
        ({"kind": "verify", "run": "tiny", "step": 2**70}, 400, "invalid-request"),
    ],
)
def test_what_cannot_work_is_refused(http: httpx.Client, wanted: dict[str, Any], status: int, code: str) -> None:
    """By name, and nothing is stored."""
    answer = http.post("/v1/jobs", json=wanted)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert http.get("/v1/jobs").json()["items"] == []


def test_unknown_jobs(http: httpx.Client) -> None:
    """404 for one that is not known, 400 for what is no number."""
    assert http.get("/v1/jobs/7").json()["code"] == "no-such-resource"
    assert http.delete("/v1/jobs/7").status_code == 404
    assert http.get(f"/v1/jobs/{2**70}").status_code == 400
    assert http.get("/v1/jobs/seven").status_code == 400

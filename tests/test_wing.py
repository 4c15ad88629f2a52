"""A daemon from a copy of the service in which all wings were deleted: it serves checkpoints, and names what it lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns, rmtree

import httpx
import pytest
import torch

import holdfast_service
from holdfast import Api, Checkpointer
from holdfast_formats.rest.offline import RootJob
from tests.daemons import RunningDaemon, running, wait_until
from tests.job_requests import request

GONE = ("cluster", "console", "convert", "merge", "notify")
LISTS = ("runs", "summaries", "nodes", "jobs", "events", "rounds", "tokens", "trash", "quotas", "views", "audit", "whoami")
SERVED = ["/healthz", "/readyz", "/openapi.json", "/metrics", *(f"/v1/{name}" for name in LISTS)]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the copy of the package."""
    directory = tmp_path_factory.mktemp("copy")
    package = directory / "holdfast_service"
    copytree(Path(holdfast_service.__file__).parent, package, ignore=ignore_patterns("__pycache__"))
    for name in GONE:
        rmtree(package / "wings" / name)
    return directory


@pytest.fixture(scope="module")
def daemon(copy: Path) -> Iterator[RunningDaemon]:
    fresh = ("env", f"PYTHONPATH={copy}")  # a fork would have imported the whole package already
    with running(copy / "root", "--keep", "2", listen="127.0.0.1:0", before=fresh) as made:
        yield made


def test_it_saves_restores_verifies_and_rotates(daemon: RunningDaemon) -> None:
    model = torch.nn.Linear(4, 4)
    with Checkpointer("tiny", {"model": model}, at=daemon.socket) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, wait="durable")
    other = torch.nn.Linear(4, 4)
    with Checkpointer("tiny", {"model": other}, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 3
    assert torch.equal(other.weight, model.weight)
    with Api(daemon.url) as api:
        wanted = {"kind": "verify", "run": "tiny", "step": 3}
        job = api.request("POST", "/v1/jobs", json=wanted).json()
        wait_until(lambda: api.request("GET", f"/v1/jobs/{job['id']}").json()["state"] == "done")
    wait_until(lambda: steps(daemon) == [3, 2])


def steps(daemon: RunningDaemon) -> list[int]:
    listed = httpx.get(f"{daemon.url}/v1/runs/tiny/checkpoints", trust_env=False).raise_for_status().json()
    return sorted((one["step"] for one in listed["items"]), reverse=True)


@pytest.mark.parametrize("path", SERVED)
def test_the_api_answers(daemon: RunningDaemon, path: str) -> None:
    assert httpx.get(daemon.url + path, trust_env=False).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/alerts", "/v1/notifications", "/v1/watched/runs"])
def test_what_it_lacks_is_named(daemon: RunningDaemon, path: str) -> None:
    """Also for a browser, which a page would be sent."""
    answer = httpx.get(daemon.url + path, headers={"Accept": "text/html"}, trust_env=False)
    assert (
        answer.status_code == 404
        and "the wings cluster, console, convert, merge, notify are not installed" in answer.json()["hint"]
    )


def test_an_option_of_an_absent_wing_is_refused(copy: Path) -> None:
    flags = ["--root", copy / "other", "--socket", copy / "s", "--listen", "none", "--watch", "http://127.0.0.1:1"]
    ended = subprocess.run(
        [sys.executable, "-m", "holdfast_service", *flags],
        env={"PYTHONPATH": str(copy), "HOME": str(copy)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 2 and "needs the wing 'notify'" in ended.stderr


def test_an_offline_job_of_an_absent_wing_is_refused(copy: Path, tmp_path: Path) -> None:
    """Before its root is made, and a repair, which is the core's, goes on to look for its root."""
    for job, says in (
        (request("import", "r", 1, **{"from": str(tmp_path)}), "needs the wing 'convert'"),
        (request("verify", "r", 1, repair=True), "does not exist"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "holdfast_service.offline"],
            input=RootJob(root=str(copy / "none"), job=job).model_dump_json(by_alias=True),
            env={"PYTHONPATH": str(copy), "HOME": str(copy)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == 2 and says in ended.stdout, ended.stdout
        assert not (copy / "none").exists()

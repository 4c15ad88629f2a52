"""A daemon whose root is in a bucket: saves, deaths, an empty machine, and buckets that are not what they were."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import torch
from typer.testing import CliRunner

import holdfast
from holdfast import Checkpointer
from holdfast.cli import app
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.rest import bodies
from holdfast_formats.rest.measurements import SaveTimes
from tests.daemons import RunningDaemon, running, wait_until, wait_until_read_back
from tests.kit.objects import (
    SECRET,
    TestBucket,
    bucket,
    bucket_server,
    moto,
    moto_bucket,
    radosgw,
    seaweedfs,
    seaweedfs_bucket,
)
from tests.kit.objects_proxy import SLOW_DOWN, Fault, Stall, faulty

__all__ = ["bucket", "bucket_server", "moto", "moto_bucket", "radosgw", "seaweedfs", "seaweedfs_bucket"]

QUICK = Path(__file__).parents[2] / "kit" / "quick"
RUN = "llama"


@pytest.fixture(autouse=True)
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The settings by which this process and its daemons reach the test's bucket."""
    name = next(name for name in ("bucket", "moto_bucket", "seaweedfs_bucket") if name in request.fixturenames)
    for key, value in request.getfixturevalue(name).server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))


@contextmanager
def served(state: Path, url: str, *flags: str, listen: str = "none") -> Iterator[RunningDaemon]:
    with running(state, "--root", url, "--state", str(state), *flags, listen=listen) as daemon:
        yield daemon


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(300, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def weights(state: dict[str, Any]) -> list[torch.Tensor]:
    moments = [value for one in state["optimizer"].state.values() for value in one.values()]
    return [*state["model"].parameters(), *moments]


def save(daemon: RunningDaemon, *steps: int, seed: int = 1) -> dict[str, Any]:
    state = state_of(seed)
    with Checkpointer(RUN, state, at=str(daemon.socket)) as checkpointer:
        for step in steps:
            checkpointer.save(step).result(180)
    return state


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def test_an_empty_machine_goes_on_from_the_bucket_alone(bucket: TestBucket, tmp_path: Path) -> None:
    """The daemon is killed and its directory is gone: the next one makes its catalog from the bucket, at once since the
    process is seen to be gone, and a launch restores the same bits.
    """
    url, state = f"{bucket.url}/team", tmp_path / "state"
    with served(state, url) as daemon:
        saved = save(daemon, 3, 7)
        daemon.kill()
    shutil.rmtree(state)
    with served(tmp_path / "other", url, listen="127.0.0.1:0") as daemon:
        restored = state_of(2)
        with Checkpointer(RUN, restored, at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore() == 7 and same(saved, restored)
            checkpointer.save(8).result(180)
        with Api(daemon.url) as api:
            assert sorted(one.step for one in api.checkpoints(RUN)) == [3, 7, 8]
            wait_until(lambda: api.checkpoint(RUN, 7).verified)
    names = bucket.sizes("team/")
    assert not [key for key in names if f"/{naming.STAGING}/" in key]
    assert {f"team/{RUN}/{naming.COMMITS}/{naming.step_directory(step)}" for step in (3, 7, 8)} <= names.keys()
    assert bucket.uploads() == [] and f"team/{naming.OWNER}" not in names


def test_a_trainer_names_the_bucket(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """`at=s3://…` starts a daemon, which is found by the same address later; what it saved is opened without one."""
    url = f"{moto_bucket.url}/team"
    saved = state_of(1)
    with Checkpointer(RUN, saved, at=url) as checkpointer:
        assert checkpointer.restore() == 0
        checkpointer.save(4).result(180)
        assert checkpointer.root() is None
    restored = state_of(2)
    with Checkpointer(RUN, restored, at=url) as checkpointer:
        assert checkpointer.steps() == [4]
        assert checkpointer.restore() == 4 and same(saved, restored)
    with holdfast.open(f"{url}/{RUN}@4") as checkpoint:
        assert torch.equal(torch.from_numpy(checkpoint.read("weight")), saved["model"].weight.detach())


def test_one_daemon_serves_a_bucket(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """Another one is refused by name as soon as it sees that the first one lives."""
    with served(tmp_path / "one", moto_bucket.url) as daemon:
        with pytest.raises(AssertionError, match="is in use by the daemon of"):
            RunningDaemon(tmp_path / "two", "--root", moto_bucket.url, "--state", str(tmp_path / "two"))
        save(daemon, 1)


def test_an_emptied_bucket_is_no_new_root(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """Not for a machine that has served it; the directory of that machine removed, it is a new one."""
    state = tmp_path / "state"
    with served(state, moto_bucket.url) as daemon:
        save(daemon, 1)
    for key in moto_bucket.sizes():
        moto_bucket.delete(key)
    with pytest.raises(AssertionError, match="was emptied, or is another bucket"):
        RunningDaemon(state, "--root", moto_bucket.url, "--state", str(state))
    shutil.rmtree(state)
    with served(state, moto_bucket.url) as daemon:
        save(daemon, 1)


def test_a_copy_of_a_bucket_is_another_root(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """Copied object by object, as `aws s3 sync` does: it has the checkpoints, and an id of its own."""
    with served(tmp_path / "one", f"{moto_bucket.url}/one", listen="127.0.0.1:0") as daemon:
        save(daemon, 1)
        first = daemon.about["root"]["id"]
    for key in moto_bucket.sizes("one/"):
        moto_bucket.put(key.replace("one/", "two/", 1), moto_bucket.read(key))
    with served(tmp_path / "two", f"{moto_bucket.url}/two", listen="127.0.0.1:0") as daemon:
        assert daemon.about["root"]["id"] != first and "is a copy of another root" in daemon.log.read_text()
        with Api(daemon.url) as api:
            assert [one.step for one in api.checkpoints(RUN)] == [1]


def test_runs_are_deleted_brought_back_and_read(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """Pages, files and shards come out of the bucket; a removed checkpoint's objects go."""
    with served(tmp_path / "one", moto_bucket.url, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        saved = save(daemon, 1, 2)
        with holdfast.open(f"{RUN}@2", url=daemon.url) as checkpoint:
            assert torch.equal(torch.from_numpy(checkpoint.read("weight")), saved["model"].weight.detach())
        for step in (1, 2):
            wait_until_read_back(daemon, RUN, step)
        api.remove(RUN, 1)
        assert [one.step for one in api.checkpoints(RUN)] == [2]
        api.request("DELETE", f"/v1/runs/{RUN}")
        assert list(api.runs()) == []
        api.request("POST", f"/v1/runs/{RUN}/undelete")
        assert [one.step for one in api.checkpoints(RUN)] == [2]
        wait_until(lambda: api.checkpoint(RUN, 2).verified)


@pytest.mark.parametrize("conditions", ["refused", "ignored"])
def test_a_bucket_without_conditions_needs_a_word(
    moto_bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conditions: Literal["refused", "ignored"]
) -> None:
    """Two daemons could replace each other's checkpoints there; who says that there is only one may save."""
    with faulty(moto_bucket.server.endpoint) as proxy:
        proxy.conditions = conditions
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with pytest.raises(AssertionError, match=f"If-None-Match are {conditions}"):
            RunningDaemon(tmp_path / "one", "--root", moto_bucket.url, "--state", str(tmp_path / "one"))
        with served(tmp_path / "two", moto_bucket.url, "--alone") as daemon:
            save(daemon, 1, 2)
    assert f"{RUN}/{naming.COMMITS}/{naming.step_directory(2)}" in moto_bucket.sizes()


def test_a_bucket_that_is_away_for_a_while(moto_bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save()` returns at once, and the save is committed when the bucket answers again."""
    with faulty(moto_bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with (
            served(tmp_path / "one", moto_bucket.url, listen="127.0.0.1:0") as daemon,
            Checkpointer(RUN, state_of(1), at=str(daemon.socket)) as checkpointer,
        ):
            checkpointer.save(1).result(180)
            away = [True]
            proxy.choose = lambda request: SLOW_DOWN if away[0] else None
            ticket = checkpointer.save(2)
            assert ticket.wait_staged(60) and not ticket.done
            with Api(daemon.url) as api:
                wait_until(lambda: "503 SlowDown" in {one.answer for one in _failing(api)})
                assert "holdfast_objects_failing_seconds{" in metrics(api)  # while the bucket does not answer
                away[0] = False
                ticket.result(180)
                wait_until(lambda: not {"put", "part"} & {one.kind for one in _failing(api)})
    assert f"{RUN}/{naming.COMMITS}/{naming.step_directory(2)}" in moto_bucket.sizes()


def _failing(api: Api) -> list[bodies.FailingRequests]:
    (node,) = api.nodes()
    assert node.bucket is not None
    return node.bucket.failing


def test_requests_are_counted(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """For the save and its check, which `holdfast show` prints, and in total."""
    with served(tmp_path / "one", moto_bucket.url, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        save(daemon, 1)
        wait_until(lambda: any((one.measured or {}).get("check_requests") for one in api.rounds(RUN)))
        (made,) = api.rounds(RUN)
        times = SaveTimes.model_validate(made.measured)
        assert times.requests and times.requests_put and times.sent_bytes and times.sent_bytes > times.bytes
        assert times.check_received_bytes and times.check_received_bytes >= times.bytes
        shown = CliRunner().invoke(app, ["show", f"{RUN}@1", "--url", daemon.url])
        assert f"requests    {times.requests:.0f} to save it" in shown.stdout and "USD at AWS's prices" in shown.stdout
        page = httpx.get(f"{daemon.url}/runs/{RUN}/checkpoints/1").text
        assert "Requests to the bucket" in page and f"{times.requests:.0f} to save it" in page
        job = {"kind": "verify", "run": RUN, "step": 1}
        httpx.post(f"{daemon.url}/v1/jobs", json=job, headers={"Idempotency-Key": "1"}).raise_for_status()
        wait_until(lambda: (api.checkpoint(RUN, 1).check or {}).get("check_requests", 0) > 0)
        with Checkpointer(RUN, state_of(2), at=str(daemon.socket)) as checkpointer:
            checkpointer.restore()
            assert checkpointer.last_restore is not None
            asked = checkpointer.last_restore.requests
            if checkpointer.last_restore.source == "bucket":
                assert asked["get"].sent and asked["get"].received_bytes >= checkpointer.last_restore.bytes
        (node,) = api.nodes()
        assert node.bucket is not None and node.bucket.requests["put"].sent >= times.requests_put
        assert 'holdfast_objects_requests_total{kind="put",tier=""}' in metrics(api)
    assert f"{RUN}@1 attempt 1: {times.requests:.0f} requests (" in daemon.log.read_text()


def metrics(api: Api) -> str:
    return api.request("GET", "/metrics").text


def test_files_are_read_by_urls_of_the_bucket(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """Without a token and without the daemon: whole files, and the ranges of a shard's plan, whose digests hold."""
    with served(tmp_path / "one", f"{moto_bucket.url}/team", listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        save(daemon, 1)
        top = f"/v1/runs/{RUN}/checkpoints/1"
        assert all(one["url"] is None for one in api.request("GET", f"{top}/files").json()["items"])
        listed = api.request("GET", f"{top}/files", params={"urls": True})
        assert listed.headers["cache-control"] == "no-store"
        for one in listed.json()["items"]:
            assert len(httpx.get(one["url"], trust_env=False).content) == one["bytes"]
        asked = {"layout": "tp=2", "urls": True}
        plan = api.request("GET", f"{top}/shard", params=asked, headers={"Accept": "application/json"}).json()
        for read in plan["reads"]:
            ranged = {"Range": f"bytes={read['start']}-{read['stop'] - 1}"}
            data = httpx.get(plan["urls"][read["file"]], headers=ranged, trust_env=False).content
            for extent in read["extents"]:
                start = extent["start"] - read["start"]
                assert digest(data[start : start + extent["length"]]) == extent["digest"]
        assert plan["reads"] and set(plan["urls"]) == {read["file"] for read in plan["reads"]}
    log = daemon.log.read_text()
    assert "X-Amz-Signature" not in log and SECRET not in log


@pytest.mark.parametrize("fault", [SLOW_DOWN, Stall()], ids=["refuses", "hangs"])
def test_a_stop_does_not_wait_for_a_bucket_that_is_away(
    fault: Fault, moto_bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends some time after the bucket's last answer, and leaves the save that is being written as a kill would: the next
    daemon commits it out of the memory that its rank has kept.
    """
    monkeypatch.setenv("PYTHONPATH", str(QUICK))
    state = state_of(1)
    with faulty(moto_bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        flags = ("--root", moto_bucket.url, "--state", str(tmp_path / "state"))
        daemon = RunningDaemon(tmp_path / "state", *flags, listen="127.0.0.1:0")
        with Checkpointer(RUN, state, at=str(daemon.socket)) as checkpointer:
            checkpointer.save(1).result(180)
            wait_until_read_back(daemon, RUN, 1)
            proxy.choose = lambda request: fault
            ticket = checkpointer.save(2, wait="staged")
            wait_until(lambda: any(one.fault for one in proxy.seen if f"/{naming.DATA}/" in one.key))
            assert daemon.stop() != 0
            log = daemon.log.read_text()
            assert "is left as by a kill" in log and "the bucket fails" in log and not ticket.done
            proxy.clear()
            with served(tmp_path / "state", moto_bucket.url):
                ticket.result(180)
        with holdfast.open(f"{moto_bucket.url}/{RUN}@2") as checkpoint:
            assert torch.equal(torch.from_numpy(checkpoint.read("weight")), state["model"].weight.detach())

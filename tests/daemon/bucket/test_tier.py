"""A bucket as the tier that a root's directory drains to: a daemon, a server of S3, and what is in the bucket."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

import holdfast
from holdfast import Checkpointer
from holdfast.rest import replicas
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointsMissing, StorageFailed
from tests.daemon.bucket.test_bucket_root import RUN, same, save, state_of
from tests.daemons import RunningDaemon, running, wait_until, wait_until_read_back
from tests.kit import commands
from tests.kit.objects import TestBucket, moto, moto_bucket
from tests.kit.objects_proxy import SLOW_DOWN, Fault, Stall, faulty

__all__ = ["moto", "moto_bucket"]

QUICK = Path(__file__).parents[2] / "kit" / "quick"
SINCE = r"since 20\d\d-\S+Z"


@pytest.fixture(autouse=True)
def settings(moto_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings by which this process and its daemons reach the test's bucket."""
    for key, value in moto_bucket.server.environment().items():
        monkeypatch.setenv(key, value)


@contextmanager
def tiered(root: Path, url: str, *flags: str) -> Iterator[tuple[RunningDaemon, Api]]:
    """A daemon whose root drains to the bucket as the tier `cloud`."""
    with running(root, "--tier", f"cloud={url}", *flags, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        yield daemon, api


def state_in(api: Api, step: int) -> str:
    found = [one.state for one in replicas.of(api, RUN, step) if one.tier == "cloud"]
    return found[0] if found else ""


def test_a_root_drains_to_a_bucket(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """Every verified checkpoint is there, is listed, and is read without the daemon; the lease is given back at the end.
    Its files are stored as the daemon was told, and control files in the usual class.
    """
    url, told = f"{moto_bucket.url}/team", ("--encryption", "AES256", "--tier-storage-class", "STANDARD_IA")
    with tiered(tmp_path / "root", url, *told) as (daemon, api):
        saved = save(daemon, 3, 7)
        for step in (3, 7):
            assert commands.call("wait", f"{RUN}@{step}", "--tier", "cloud", "--url", daemon.url).exit_code == 0
            assert state_in(api, step) == "present"
        wrong = commands.call("wait", f"{RUN}@9", "--tier", "other", "--url", daemon.url)
        assert wrong.exit_code == 3 and "no tier or replica 'other': it has cloud" in wrong.stderr
        assert naming.OWNER in {key.removeprefix("team/") for key in moto_bucket.sizes()}
        (node,) = api.nodes()
        assert node.replicas == {"cloud": None}
        (copy,) = replicas.of(api, RUN, 7)
        assert copy.measured is not None and copy.measured["requests_put"] and copy.measured["received_bytes"] >= copy.bytes
        wait_until(lambda: api.nodes()[0].lags[0].missing == 0)
        shown = commands.call("show", f"{RUN}@7", "--url", daemon.url).stdout
        assert "copied to   cloud: has every checkpoint" in shown
        assert f"to cloud    {copy.measured['requests']:.0f} requests (" in shown
        assert "cloud" in commands.call("nodes", "--url", daemon.url).stdout
        for page in ("/nodes", f"/runs/{RUN}", f"/runs/{RUN}/checkpoints/7"):
            assert "cloud" in httpx.get(daemon.url + page).text, page
        assert "writes and lists" in httpx.get(f"{daemon.url}/runs/{RUN}/checkpoints/7").text
    with holdfast.open(f"{url}/{RUN}@7") as checkpoint:
        assert torch.equal(torch.from_numpy(checkpoint.read("weight")), saved["model"].weight.detach())
    assert f"team/{naming.OWNER}" not in moto_bucket.sizes() and moto_bucket.uploads() == []
    for key in moto_bucket.sizes():
        found = moto_bucket.server.s3.head_object(Bucket=moto_bucket.name, Key=key)
        assert found["ServerSideEncryption"] == "AES256"
        assert found.get("StorageClass") == ("STANDARD_IA" if f"/{naming.DATA}/" in key else None), key


def test_an_empty_machine_begins_from_the_tier_alone(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """The machine is gone with its disk: another one restores the newest step out of the bucket, bit for bit, and trains on
    as a newer attempt; what it saves drains beside the old checkpoints. The step is copied back behind the restore.
    """
    url = f"{moto_bucket.url}/team"
    with tiered(tmp_path / "root", url) as (daemon, api):
        saved = save(daemon, 3, 7)
        wait_until(lambda: state_in(api, 3) == state_in(api, 7) == "present")
        attempt = api.checkpoint(RUN, 7).attempt
        daemon.kill()
    shutil.rmtree(tmp_path / "root")
    with tiered(tmp_path / "new", url) as (daemon, api):
        restored = state_of(2)
        with Checkpointer(RUN, restored, at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore() == 7 and same(saved, restored)
            report = checkpointer.last_restore
            assert report is not None and report.bytes_by == {"tier cloud": report.bytes_read} and report.notes == ()
            assert json.loads(checkpointer.read_asset(7, naming.STATE))
            wait_until(lambda: 7 in {one.step for one in api.checkpoints(RUN)})
            checkpointer.save(8).result(120)
        assert api.checkpoint(RUN, 8).attempt > attempt
        wait_until(lambda: state_in(api, 8) == "present")
        found = httpx.get(f"{daemon.url}/v1/events?kind=run-found").json()["items"]
        assert [(event["run"], event["detail"]["tier"]) for event in found] == [(RUN, "cloud")]
    kept = {naming.step_directory(step) for step in (3, 7, 8)}
    assert {key.rpartition("/")[2] for key in moto_bucket.sizes(f"team/{RUN}/{naming.COMMITS}/")} == kept


def test_damaged_copies_are_named_and_the_others_are_used(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """The machine is gone; in the tier, one checkpoint has lost its files, and the newest has other bytes. The newest one is
    not replaced in silence; the one before it is restored by its step, later restores begin there, and saves drain again.
    Where all copies are damaged, nothing begins at zero in silence.
    """
    with tiered(tmp_path / "root", moto_bucket.url) as (daemon, api):
        save(daemon, 3, 5, 7)
        wait_until(lambda: {state_in(api, step) for step in (3, 5, 7)} == {"present"})
        daemon.kill()
    shutil.rmtree(tmp_path / "root")
    for key, size in moto_bucket.sizes(f"{RUN}/{naming.DATA}/").items():
        if "/step-00000003." in key:
            moto_bucket.delete(key)
        elif "/step-00000007." in key and key.endswith("model.safetensors"):
            moto_bucket.put(key, bytes(size))
    with tiered(tmp_path / "new", moto_bucket.url) as (daemon, api):
        with Checkpointer(RUN, state_of(2), at=str(daemon.socket)) as checkpointer:
            with pytest.raises(CheckpointsMissing, match=r"the copies of steps 7, 3 are damaged.*\n.*restore\(step=5\)"):
                checkpointer.restore()
            assert checkpointer.restore(5) == 5
        with Checkpointer(RUN, state_of(2), at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore() == 5
            checkpointer.save(8).result(120)
        wait_until(lambda: state_in(api, 8) == "present")
        daemon.kill()
    for key in moto_bucket.sizes(f"{RUN}/{naming.DATA}/"):
        moto_bucket.delete(key)
    with (
        tiered(tmp_path / "newer", moto_bucket.url) as (daemon, _),
        Checkpointer(RUN, state_of(2), at=str(daemon.socket)) as checkpointer,
        pytest.raises(CheckpointsMissing, match="the copies of steps 8, 7, 5, 3 are damaged"),
    ):
        checkpointer.restore()


def test_what_is_damaged_in_the_root_is_read_from_the_tier(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """By range: the rest comes from the disk. The report names the damage and both places, and the root is repaired behind
    the restore.
    """
    with tiered(tmp_path / "root", moto_bucket.url) as (daemon, api):
        saved = save(daemon, 7)
        wait_until(lambda: state_in(api, 7) == "present")
        shard = tmp_path / "root" / naming.checkpoint_path(RUN, 7) / "model.safetensors"
        sound, times = shard.read_bytes(), shard.stat()
        shard.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # the daemon does not see it before the restore
        restored = state_of(2)
        with Checkpointer(RUN, restored, at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore() == 7 and same(saved, restored)
            report = checkpointer.last_restore
        assert report is not None and set(report.bytes_by) == {"directory", "tier cloud"}
        assert all(report.bytes_by.values()) and sum(report.bytes_by.values()) == report.bytes_read
        (note,) = report.notes
        assert "the checkpoint in the root was passed over (model.safetensors: " in note and note in checkpointer.notices
        assert "bytes from directory" in note and "bytes from tier cloud" in note
        wait_until(lambda: shard.read_bytes() == sound)


def test_ranks_that_cannot_read_the_tier_wait_for_the_root(
    moto_bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no keys: the daemon copies the step back first, and the report says why."""
    with tiered(tmp_path / "root", moto_bucket.url) as (daemon, api):
        saved = save(daemon, 7)
        wait_until(lambda: state_in(api, 7) == "present")
        daemon.stop()
    shutil.rmtree(tmp_path / "root")
    with tiered(tmp_path / "new", moto_bucket.url) as (daemon, _):
        for key in moto_bucket.server.environment():
            monkeypatch.delenv(key)
        restored = state_of(2)
        with Checkpointer(RUN, restored, at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore() == 7 and same(saved, restored)
            report = checkpointer.last_restore
        assert report is not None and set(report.bytes_by) == {"directory"}
        assert [note for note in report.notes if "the copy in tier cloud could not be read from here" in note]


def test_a_newer_damaged_copy_is_named_in_the_report(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """The root has an older step, and takes it: never in silence."""
    with tiered(tmp_path / "root", moto_bucket.url) as (daemon, api):
        save(daemon, 3, 7)
        wait_until(lambda: {state_in(api, step) for step in (3, 7)} == {"present"})
        daemon.stop()
    shutil.rmtree(tmp_path / "root")
    with tiered(tmp_path / "new", moto_bucket.url) as (daemon, api):
        with Checkpointer(RUN, state_of(2), at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore(step=3) == 3
        wait_until(lambda: 3 in {one.step for one in api.checkpoints(RUN)})
        for key, size in moto_bucket.sizes(f"{RUN}/{naming.DATA}/").items():
            if "/step-00000007." in key and key.endswith("model.safetensors"):
                moto_bucket.put(key, bytes(size))
        restored = state_of(2)
        with Checkpointer(RUN, restored, at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore() == 3
            report = checkpointer.last_restore
        assert report is not None
        (note,) = [note for note in report.notes if note.startswith("step 7 in tier cloud is damaged (model.safetensors: ")]
        assert note.endswith("restored step 3 instead") and note in checkpointer.notices


def test_a_step_in_a_tier_that_does_not_answer_is_refused_by_its_name(
    moto_bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint exists: what is wrong is that the tier cannot be read."""
    with faulty(moto_bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with tiered(tmp_path / "root", moto_bucket.url, "--keep", "1") as (daemon, api):
            state = state_of(1)
            with Checkpointer(RUN, state, at=str(daemon.socket)) as checkpointer:
                for step in (1, 2, 3):
                    checkpointer.save(step).result(120)
                    wait_until(lambda step=step: state_in(api, step) == "present")
                wait_until(lambda: 1 not in {made.step for made in api.checkpoints(RUN)})
                proxy.choose = lambda request: SLOW_DOWN
                with pytest.raises(CheckpointsMissing, match=rf"step 1 of \w+ is not in the root.*cloud.*{SINCE}.*503 Slow"):
                    checkpointer.restore(step=1)
            proxy.clear()


@pytest.mark.objects
def test_an_empty_machine_is_told_that_the_tier_is_silent(
    moto_bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it has listed the run, or since: the refusal says since when, and what was answered last. Nothing begins at
    zero, and no repair is advised that cannot be made.
    """
    with tiered(tmp_path / "root", moto_bucket.url) as (daemon, api):
        save(daemon, 3)
        wait_until(lambda: state_in(api, 3) == "present")
    monkeypatch.setenv("PYTHONPATH", str(QUICK))
    with faulty(moto_bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with (
            tiered(tmp_path / "listed", moto_bucket.url) as (daemon, api),
            Checkpointer(RUN, state_of(2), at=str(daemon.socket)) as checkpointer,
        ):
            wait_until(lambda: any(api.runs()))
            proxy.choose = lambda request: Stall()
            with pytest.raises(CheckpointsMissing, match=rf"replica cloud has step 3, but .*{SINCE}") as missing:
                checkpointer.restore()
            assert "try again once it answers" in missing.value.hint
            daemon.kill()
        with tiered(tmp_path / "empty", moto_bucket.url) as (daemon, _):
            with (
                pytest.raises(StorageFailed, match=rf"the tier cloud may have checkpoints of it: .*{SINCE}.*answer"),
                Checkpointer(RUN, state_of(2), at=str(daemon.socket)) as checkpointer,
            ):
                checkpointer.restore()
            daemon.kill()


@pytest.mark.objects
@pytest.mark.parametrize("fault", [SLOW_DOWN, Stall()], ids=["refuses", "hangs"])
def test_saves_know_nothing_of_a_tier_that_is_away(
    fault: Fault, moto_bucket: TestBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are committed and verified in the root meanwhile, and are copied when the bucket answers again, the newest first.
    A daemon that is stopped in between does not wait for the bucket.
    """
    with faulty(moto_bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        with tiered(tmp_path / "root", moto_bucket.url) as (daemon, api):
            with Checkpointer(RUN, state_of(1), at=str(daemon.socket)) as checkpointer:
                checkpointer.save(1).result(120)
                wait_until(lambda: state_in(api, 1) == "present")
                proxy.choose = lambda request: fault
                for step in (2, 3):
                    checkpointer.save(step).result(120)
                    wait_until_read_back(daemon, RUN, step)
            assert "present" not in (state_in(api, 2), state_in(api, 3))
            daemon.stop()
        proxy.clear()
        with tiered(tmp_path / "root", moto_bucket.url) as (_, api):
            wait_until(lambda: state_in(api, 2) == state_in(api, 3) == "present")
    assert moto_bucket.uploads() == []

"""A tier from which something other than Holdfast has removed objects: what is gone is noticed, told, and copied again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast import Checkpointer
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.rest.retention import RetentionPolicy
from tests.daemon.bucket.test_bucket_root import RUN, save, settings, state_of
from tests.daemon.bucket.test_tier import state_in, tiered
from tests.daemons import RunningDaemon, wait_until
from tests.kit.objects import TestBucket, bucket, bucket_server, moto, radosgw, seaweedfs

__all__ = ["bucket", "bucket_server", "moto", "radosgw", "seaweedfs", "settings"]

PREFIX = "team"


def told(daemon: RunningDaemon, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{daemon.url}/v1/events?kind={kind}").json()["items"]
    return found


def committed(bucket: TestBucket) -> set[str]:
    return {key.rpartition("/")[2] for key in bucket.sizes(f"{PREFIX}/{RUN}/{naming.COMMITS}/")}


def steps_of(api: Api) -> list[int]:
    return sorted(one.step for one in api.checkpoints(RUN))


def keep_newest(api: Api) -> None:
    retention.set_policy(api, RUN, RetentionPolicy(last=1), retention.policy(api, RUN).tag)


def test_an_emptied_prefix_is_filled_again(bucket: TestBucket, tmp_path: Path) -> None:
    """At the next copy its mark and its lease are made again, and everything that the root has is copied again; an event
    tells it. What the daemon then knows of the bucket is true.
    """
    with tiered(tmp_path / "root", f"{bucket.url}/{PREFIX}") as (daemon, api):
        save(daemon, 3, 7)
        wait_until(lambda: state_in(api, 3) == state_in(api, 7) == "present")
        for key in bucket.sizes():
            bucket.delete(key)
        save_more(daemon)
        wait_until(lambda: {state_in(api, step) for step in (3, 7, 9)} == {"present"})
        (event,) = told(daemon, "copies-gone")
        assert (event["level"], event["run"]) == ("warning", RUN)
        assert event["detail"] == {"tier": "cloud", "copies": 2, "lost": 0}
        assert {naming.ROOT_FILE, naming.OWNER} <= {key.removeprefix(f"{PREFIX}/") for key in bucket.sizes()}
        assert committed(bucket) == {naming.step_directory(step) for step in (3, 7, 9)}
        (node,) = api.nodes()
        assert node.replicas == {"cloud": None}


def save_more(daemon: RunningDaemon) -> None:
    with Checkpointer(RUN, state_of(2), at=str(daemon.socket)) as checkpointer:
        checkpointer.restore()
        checkpointer.save(9).result(180)


@pytest.mark.parametrize("whole", [True, False], ids=["all", "data"])
def test_retention_looks_before_it_removes(whole: bool, bucket: TestBucket, tmp_path: Path) -> None:
    """Copies were removed by hand, or their files alone: retention, which knows them as copied, keeps the checkpoints in the
    root until they are in the bucket again.
    """
    with tiered(tmp_path / "root", f"{bucket.url}/{PREFIX}") as (daemon, api):
        save(daemon, 3, 5, 7)
        wait_until(lambda: {state_in(api, step) for step in (3, 5, 7)} == {"present"})
        gone = (naming.COMMITS, naming.DATA) if whole else (naming.DATA,)
        for room in gone:
            for key in bucket.sizes(f"{PREFIX}/{RUN}/{room}/"):
                bucket.delete(key)
        keep_newest(api)
        wait_until(lambda: steps_of(api) == [7])
        for step in (3, 5):
            data = bucket.sizes(f"{PREFIX}/{RUN}/{naming.DATA}/")
            names = {key.rpartition("/")[2] for key in data if f"/{naming.step_directory(step)}." in key}
            assert naming.step_directory(step) in committed(bucket)
            assert {naming.COMMIT, naming.MANIFEST, "model.safetensors"} <= names

"""Two machines that train one run in turns, each with a root of its own, through one tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from holdfast import Checkpointer
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointsMissing
from tests.daemon.bucket.test_bucket_root import RUN, same, settings, state_of
from tests.daemon.bucket.test_tier import state_in, tiered
from tests.daemons import RunningDaemon, wait_until, wait_until_read_back
from tests.kit.objects import TestBucket, bucket, bucket_server, moto, radosgw, seaweedfs
from tests.kit.objects_proxy import SLOW_DOWN, FaultProxy, faulty

__all__ = ["bucket", "bucket_server", "moto", "radosgw", "seaweedfs", "settings"]


@pytest.fixture
def proxy(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with faulty(bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        yield proxy


def train(state: dict[str, Any], checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        with torch.no_grad():
            state["model"].weight += step
        checkpointer.save(step).result(180)


def told(daemon: RunningDaemon, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{daemon.url}/v1/events?kind={kind}").json()["items"]
    return found


def committed(bucket: TestBucket) -> dict[int, bytes]:
    """The commit object of each step in the tier."""
    found = {key: bucket.read(key) for key in bucket.sizes(f"{RUN}/{naming.COMMITS}/")}
    steps = {naming.parse_step_directory(key.rpartition("/")[2]): data for key, data in found.items()}
    return {step: data for step, data in steps.items() if step is not None}


@contextmanager
def first_machine(root: Path, url: str, proxy: FaultProxy) -> Iterator[dict[str, Any]]:
    """Trains to step 30; the machine ends before step 30 is in the tier."""
    state = state_of(1)
    with tiered(root, url) as (daemon, api), Checkpointer(RUN, state, at=str(daemon.socket)) as checkpointer:
        checkpointer.restore()
        train(state, checkpointer, 10, 20)
        wait_until(lambda: state_in(api, 10) == state_in(api, 20) == "present")
        proxy.choose = lambda request: SLOW_DOWN if request.method == "PUT" else None
        train(state, checkpointer, 30)
        wait_until_read_back(daemon, RUN, 30)
        daemon.kill()
    proxy.clear()
    yield state


def second_machine(root: Path, url: str, *steps: int) -> dict[str, Any]:
    """Begins from the tier at step 20, and trains on."""
    state = state_of(2)
    with tiered(root, url) as (daemon, api), Checkpointer(RUN, state, at=str(daemon.socket)) as checkpointer:
        assert checkpointer.restore() == 20
        train(state, checkpointer, *steps)
        wait_until(lambda: {state_in(api, step) for step in steps} == {"present"})
    return state


def test_the_line_of_the_newest_launch_is_followed(bucket: TestBucket, tmp_path: Path, proxy: FaultProxy) -> None:
    """The first machine comes back with a step 30 that the second one has replaced by its own: it is not copied, and says
    why; nothing in the tier changes. Its next launch goes on from step 40 of the second machine, on a line of its own; a
    third machine finds one line.
    """
    url, first = bucket.url, tmp_path / "first"
    with first_machine(first, url, proxy):
        pass
    other = second_machine(tmp_path / "second", url, 30, 40)
    before = committed(bucket)
    assert set(before) == {10, 20, 30, 40}
    with tiered(first, url) as (daemon, api):
        wait_until(lambda: bool(told(daemon, "run-continued")))
        (event,) = told(daemon, "run-continued")
        assert "another machine has trained on as attempt 2, from step 20" in event["text"]
        wait_until(lambda: bool(told(daemon, "replica-failed")))
        (refused,) = told(daemon, "replica-failed")
        assert refused["step"] == 30 and "is not copied: the run went on from step 20 as attempt 2" in refused["text"]
        assert committed(bucket) == before
        state = state_of(3)
        with Checkpointer(RUN, state, at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore() == 40 and same(state, other)
            train(state, checkpointer, 50)
        assert api.checkpoint(RUN, 30).abandoned and api.checkpoint(RUN, 50).attempt == 3
        assert [tuple(one) for one in api.checkpoint(RUN, 50).rewinds] == [(2, 1, 20), (3, 1, 40)]
        wait_until(lambda: state_in(api, 50) == "present")
    after = committed(bucket)
    assert set(after) == {10, 20, 30, 40, 50} and {step: after[step] for step in before} == before
    with tiered(tmp_path / "third", url) as (daemon, _):
        restored = state_of(4)
        with Checkpointer(RUN, restored, at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore() == 50 and same(restored, state)


def test_a_step_that_was_left_behind_is_taken_by_its_name_alone(
    bucket: TestBucket, tmp_path: Path, proxy: FaultProxy
) -> None:
    """The second machine has only a step 30 of its own: restore() of the first one says which line is the newest, and does
    not mix; `restore(step=30)` goes on from its own step, as a line that begins there, which is copied.
    """
    url, first = bucket.url, tmp_path / "first"
    with first_machine(first, url, proxy) as trained:
        second_machine(tmp_path / "second", url, 30)
        before = committed(bucket)
        with tiered(first, url) as (daemon, api):
            wait_until(lambda: bool(told(daemon, "run-continued")))
            state = state_of(3)
            with Checkpointer(RUN, state, at=str(daemon.socket)) as checkpointer:
                with pytest.raises(CheckpointsMissing, match="another machine has trained llama on from step 20"):
                    checkpointer.restore()
                assert checkpointer.restore(30) == 30 and same(state, trained)
                train(state, checkpointer, 40)
            wait_until(lambda: state_in(api, 40) == "present")
            rewinds = api.checkpoint(RUN, 40).rewinds
            assert [one[2] for one in rewinds] == [30] and rewinds[0][0] == 3
        after = committed(bucket)
    assert {step: after[step] for step in before} == before and set(after) == {10, 20, 30, 40}


def test_a_line_that_went_back_is_followed_in_the_tier_too(bucket: TestBucket, tmp_path: Path, proxy: FaultProxy) -> None:
    """Steps that are saved again replace those of the line that was left, also where the root has removed these. An empty
    machine begins with the newest step of the new line, although the tier has a newer one of the old line.
    """
    url, left, state = bucket.url, state_of(1), state_of(2)
    with tiered(tmp_path / "first", url, "--keep", "2") as (daemon, api):
        with Checkpointer(RUN, left, at=str(daemon.socket)) as checkpointer:
            checkpointer.restore()
            train(left, checkpointer, 2, 4, 6, 8, 10)
            wait_until(lambda: set(committed(bucket)) == {2, 4, 6, 8, 10})
            wait_until(lambda: {state_in(api, step) for step in (8, 10)} == {"present"})
        with Checkpointer(RUN, state, at=str(daemon.socket)) as checkpointer:
            assert checkpointer.restore(step=4) == 4
            train(state, checkpointer, 6, 8)
            wait_until(lambda: {state_in(api, step) for step in (6, 8)} == {"present"})
        wait_until_read_back(daemon, RUN, 8)
    assert set(committed(bucket)) == {2, 4, 6, 8, 10}
    begun = state_of(3)
    with (
        tiered(tmp_path / "second", url) as (daemon, _),
        Checkpointer(RUN, begun, at=str(daemon.socket)) as checkpointer,
    ):
        assert checkpointer.restore() == 8
        assert same(begun, state)

"""A daemon that drains to a bucket is killed at named points of a copy: the next start goes on with it.

A part or file that the server has acknowledged is never sent again. What was on its way to it when the daemon was killed,
at most one part on each connection, is. Nothing committed is lost, in the root or in the bucket, and one sweep leaves no
garbage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.rest import replicas
from holdfast.rest.api import Api
from holdfast_files.objects import client
from holdfast_files.objects.object_files import ObjectFiles
from holdfast_files.objects.probe import HONOURED
from holdfast_formats import naming
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.objects.conditional_puts import ConditionalPuts
from holdfast_service.storage.objects.object_store import ObjectStore
from holdfast_service.storage.objects.uploads import CONNECTIONS, PART_BYTES, Uploads
from holdfast_service.storage.posix import PosixTier
from tests.cluster.test_named_points import Marks, marks_at
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.objects import TestBucket
from tests.kit.objects_proxy import FaultProxy, faulty

RUN, ROWS = "run", 3700  # with which the model's file has four parts
SENDING = (
    "an upload is begun",
    "before a part",
    "a part is sent",
    "before parts are put together",
    "parts are put together",
)
PUTTING = ("before a file is put", "a file is put", "before a copy is read back")
COMMITTING = (
    "before a copy is published",
    "COMMIT of a copy is put",
    "before the commit object",
    "the commit object is put",
)
POINTS = ("a copy begins", *SENDING, *PUTTING, *COMMITTING, "before a copy is recorded", "a copy is recorded")
SOME = ("a part is sent", "before a copy is read back", "the commit object is put")
SMALL = (naming.MANIFEST, naming.COMMIT)  # put again by each commit

marks = marks_at(POINTS)


@pytest.fixture
def proxy(seaweedfs_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Counts what the daemons send."""
    with faulty(seaweedfs_bucket.server.endpoint) as made:
        for key, value in seaweedfs_bucket.server.environment(made.endpoint).items():
            monkeypatch.setenv(key, value)
        yield made


def test_a_daemon_is_killed_at_some_points_of_a_drain(
    seaweedfs_bucket: TestBucket, proxy: FaultProxy, marks: Marks, tmp_path: Path
) -> None:
    _kill_at(SOME, seaweedfs_bucket, proxy, marks, tmp_path)


@pytest.mark.objects
def test_a_daemon_is_killed_at_every_point_of_a_drain(
    seaweedfs_bucket: TestBucket, proxy: FaultProxy, marks: Marks, tmp_path: Path
) -> None:
    _kill_at(POINTS, seaweedfs_bucket, proxy, marks, tmp_path)


def _kill_at(points: Sequence[str], bucket: TestBucket, proxy: FaultProxy, marks: Marks, directory: Path) -> None:
    root, again = directory / "root", 0
    state = {"model": torch.nn.Linear(ROWS, ROWS)}
    steps = range(1, len(points) + 1)
    for step, point in zip(steps, points, strict=True):
        with _draining(root, bucket) as daemon:
            marks.arm(point)
            with Checkpointer(RUN, state, at=str(daemon.socket)) as checkpointer:
                checkpointer.save(step, existing="replace").result(180)
            marks.victim({"it": daemon})
            daemon.kill()
        with _draining(root, bucket) as daemon, Api(daemon.url) as api:
            wait_until(lambda: [one.state for one in replicas.of(api, RUN, step)] == ["present"])  # noqa: B023
        twice = _sent_again(bucket, proxy, step)
        print(f"{point}: {twice} sent again", flush=True)
        again += twice
    print(f"\n{len(points)} kills, {again} parts or files sent again, which were on their way", flush=True)
    _sound(bucket, root, [*steps])


def _draining(root: Path, bucket: TestBucket) -> AbstractContextManager[RunningDaemon]:
    return running(root, "--tier", f"cloud={bucket.url}", listen="127.0.0.1:0")


def _sent_again(bucket: TestBucket, proxy: FaultProxy, step: int) -> int:
    """How many parts and files of a step's copy were sent again; none of them had been acknowledged."""
    top = f"{RUN}/{naming.DATA}/{naming.step_directory(step)}."
    needed = {key: -(-size // PART_BYTES) for key, size in bucket.sizes(top).items() if not key.endswith(SMALL)}
    bodies = [one for one in proxy.seen if one.kind in ("part", "put") and one.key in needed]
    assert len({key.split("/")[2] for key in needed}) == 1
    assert Counter(one.key for one in bodies if 200 <= one.status < 300) == needed
    twice = len(bodies) - sum(needed.values())
    assert 0 <= twice <= CONNECTIONS
    return twice


def _sound(bucket: TestBucket, root: Path, steps: list[int]) -> None:
    """What is committed is right, and one sweep removes all the rest."""
    opened = client.opened(bucket.url)
    uploads = Uploads(opened)
    try:
        for step in steps:
            for files in (ObjectFiles(opened), PosixTier(root)):
                verify(files, naming.checkpoint_path(RUN, step))
        ObjectStore(uploads, ConditionalPuts(opened, HONOURED)).sweep()
        top = f"{RUN}/{naming.DATA}/"
        left = {key.removeprefix(top).partition("/")[0] for key in bucket.sizes(top)}
        assert len(left) == len(steps) and bucket.uploads() == []
    finally:
        uploads.close()
        opened.close()

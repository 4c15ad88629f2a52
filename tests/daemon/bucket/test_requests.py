"""How many requests a daemon makes of a bucket: docs/object-storage.md states the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Checkpointer
from holdfast.rest.api import Api
from holdfast_files.objects import client
from holdfast_formats import naming
from holdfast_formats.naming import Place
from holdfast_service.storage.objects import HONOURED, ConditionalPuts, ObjectStore, Uploads
from holdfast_service.storage.objects.uploads import PART_BYTES
from holdfast_service.storage.store import CommitContents
from tests.checkpoints import build
from tests.daemon.bucket.test_bucket_root import RUN, moto, moto_bucket, served, settings
from tests.daemons import wait_until
from tests.kit.bucket_roots import NO_DAEMON
from tests.kit.commands import call_json
from tests.kit.objects import TestBucket
from tests.kit.objects_proxy import FaultProxy, Seen, faulty

__all__ = ["moto", "moto_bucket", "settings"]


class Stored(NamedTuple):
    """What the objects of a checkpoint are: the files, and for those of several parts their parts and ranges."""

    files: int
    parts: int
    ranges: int


@pytest.fixture
def proxy(moto_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with faulty(moto_bucket.server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        yield proxy


@contextmanager
def asked(proxy: FaultProxy) -> Iterator[list[Seen]]:
    """Requests of a block, filled in at its end, without those for the lease, which come with time."""
    before, found = len(proxy.seen), list[Seen]()
    yield found
    found += [one for one in proxy.seen[before:] if not one.key.endswith(naming.OWNER)]


def save_and_read_back(bucket: TestBucket, proxy: FaultProxy, checkpointer: Checkpointer, step: int) -> None:
    """Save, and wait until each file was read back. The daemon is not asked for it: a list of the run reads run.json."""
    checkpointer.save(step).result(120)
    name = f"/{naming.step_directory(step)}."
    wait_until(
        lambda: len({one.key for one in proxy.seen if one.kind == "get" and name in one.key}) == stored(bucket, step).files
    )


def stored(bucket: TestBucket, step: int) -> Stored:
    name = f"/{naming.step_directory(step)}."
    sizes = [size for key, size in bucket.sizes(f"{RUN}/{naming.DATA}/").items() if name in key]
    parts = sum(-(-size // PART_BYTES) for size in sizes if size > PART_BYTES)
    return Stored(len(sizes), parts, sum(-(-size // PART_BYTES) for size in sizes if size > PART_BYTES))


@pytest.mark.parametrize("width", [200, 5000])
def test_saves(moto_bucket: TestBucket, proxy: FaultProxy, tmp_path: Path, width: int) -> None:
    """Files of one request and files of several parts. No list; at most 4 requests a file, one for each part that is sent
    and each 16 MiB that are read back, and 6. Some saves together: what follows one may come beside the next.
    """
    steps = range(2, 5)
    with (
        served(tmp_path / "one", moto_bucket.url) as daemon,
        Checkpointer(RUN, {"model": torch.nn.Linear(width, 1000)}, at=str(daemon.socket)) as checkpointer,
    ):
        save_and_read_back(moto_bucket, proxy, checkpointer, 1)
        with asked(proxy) as found:
            for step in steps:
                save_and_read_back(moto_bucket, proxy, checkpointer, step)
    made, counts = [stored(moto_bucket, step) for step in steps], Counter(one.kind for one in found)
    assert counts["list"] == counts["uploads"] == counts["delete"] == counts["deletes"] == 0
    written = [one.key for one in found if one.kind in ("put", "begin") and "/step-" in one.key]
    assert len(written) == sum(
        one.files + 2 for one in made
    )  # and the mark of its line; the launch's records may come as late as its first save
    assert counts["part"] == sum(one.parts for one in made)
    bound = sum(one.parts + one.ranges + 4 * one.files + 6 for one in made)
    assert counts.total() <= bound, "\n".join(f"{one.kind} {one.key}" for one in found)


def test_a_start_reads_one_commit_object_a_checkpoint(moto_bucket: TestBucket, proxy: FaultProxy, tmp_path: Path) -> None:
    """On a machine that knows nothing: what lists show is in them. A list of runs, and of one, costs as much."""
    steps = range(1, 41)
    with closing(client.opened(moto_bucket.url)) as bucket:
        store = ObjectStore(Uploads(bucket), ConditionalPuts(bucket, HONOURED))
        for step in steps:
            path = tmp_path / naming.checkpoint_path(RUN, step)
            built = build(path, {"model": {"w": np.full((4, 4), step, np.float32)}}, run=RUN, step=step)
            files = {one.name: one.read_bytes() for one in path.iterdir()}
            manifest, commit = files.pop(naming.MANIFEST), files.pop(naming.COMMIT)
            store.begin(place := Place(RUN, step, 1))
            assert store.commit(place, CommitContents({}, files, manifest, commit)).outcome == "published"
    moto_bucket.put(naming.ROOT_FILE, NO_DAEMON)
    for one in (call_json("ls", "--root", moto_bucket.url), call_json("ls", RUN, "--root", moto_bucket.url)):
        assert proxy.kinds()["head"] == 0 and len(one) in (1, len(steps))
    described = call_json("ls", RUN, "--root", moto_bucket.url)[0]
    assert (described["step"], described["bytes"], described["metrics"]) == (40, built.manifest.bytes, {"loss": 2.5})
    begin = len(proxy.seen)
    with holdfast.open(f"{moto_bucket.url}/{RUN}@latest") as newest:
        assert newest.step == 40
    kinds = Counter((one.kind, f"/{naming.COMMITS}/" in one.key) for one in proxy.seen[begin:])
    assert kinds["list", False] + kinds["list", True] <= 3 and kinds["get", True] == 1, (
        "two lists find it, one is of its files"
    )
    begin = len(proxy.seen)
    with served(tmp_path / "state", moto_bucket.url, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        wait_until(lambda: any(run.checkpoints == len(steps) for run in api.runs()))
        listed = proxy.seen[begin:]
    assert sum(one.kind == "get" and f"/{naming.COMMITS}/" in one.key for one in listed) <= len(steps) + 5
    assert sum(one.kind == "list" for one in listed) <= 40

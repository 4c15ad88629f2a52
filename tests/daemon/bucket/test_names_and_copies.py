"""Runs with every name that a run may have, and a root that was copied object by object while it was written."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer
from holdfast.read.checkpoint_root import root_of
from holdfast.read.root_index import RootIndex
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.errors import Damaged
from tests.daemon.bucket.test_bucket_root import RUN, save, served, state_of
from tests.kit.objects import TestBucket, moto, moto_bucket, seaweedfs, seaweedfs_bucket

__all__ = ["moto", "moto_bucket", "seaweedfs", "seaweedfs_bucket"]

NAMES = ("A.b_c-9", "a..b", "a.", "a--b__c", "0", "commits", "data", "run.json", "COMMIT", "x" * 128)


@pytest.fixture(autouse=True)
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The settings by which this process and its daemons reach the test's bucket."""
    name = next(name for name in ("moto_bucket", "seaweedfs_bucket") if name in request.fixturenames)
    for key, value in request.getfixturevalue(name).server.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-home"))


def test_names_of_runs(seaweedfs_bucket: TestBucket, tmp_path: Path) -> None:
    """Also those that look like objects of Holdfast's own, or like paths: each run has its own bits, with and without a
    daemon.
    """
    with served(tmp_path / "one", seaweedfs_bucket.url, listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        for number, name in enumerate(NAMES):
            with Checkpointer(name, {"weight": torch.full((8,), float(number))}, at=str(daemon.socket)) as checkpointer:
                checkpointer.save(1).result(180)
        assert {run.name for run in api.runs()} == set(NAMES)
    for number, name in enumerate(NAMES):
        with holdfast.open(f"{seaweedfs_bucket.url}/{name}@1") as checkpoint:
            (tensor,) = (one for group in checkpoint.manifest.tensors.values() for one in group if "weight" in one)
            assert set(checkpoint.read(tensor, group="extra").tolist()) == {float(number)}, name


def test_a_root_that_is_copied_while_it_is_written(moto_bucket: TestBucket, tmp_path: Path) -> None:
    """`aws s3 sync` copies in the order of keys, commit objects before data, and what came after its list is missing: each
    step of the copy is whole, or is damaged by name. A daemon of the copy goes on from the newest whole one.
    """
    with served(tmp_path / "one", f"{moto_bucket.url}/one") as daemon:
        save(daemon, 1, 2, 3)
    keys = sorted(moto_bucket.sizes("one/"))
    last = next(i for i, key in enumerate(keys) if f"/{naming.DATA}/{naming.step_directory(3)}" in key)
    for cut in (last, last + 2, len(keys)):
        place = f"copy-{cut}"
        for key in keys[:cut]:
            moto_bucket.put(key.replace("one/", f"{place}/", 1), moto_bucket.read(key))
        whole = []
        with closing(RootIndex(root_of(f"{moto_bucket.url}/{place}"))) as index:
            listed = sorted(one.step for one in index.checkpoints(RUN).checkpoints)
        for step in listed:
            try:
                with holdfast.open(f"{moto_bucket.url}/{place}/{RUN}@{step}") as checkpoint:
                    checkpoint.read("weight")
                    whole.append(step)
            except Damaged as error:
                assert re.search("gone|missing|has no manifest", error.detail)
        assert listed == [1, 2, 3] and whole == ([1, 2, 3] if cut == len(keys) else [1, 2])
    with (
        served(tmp_path / "two", f"{moto_bucket.url}/copy-{last}") as daemon,
        Checkpointer(RUN, state_of(2), at=str(daemon.socket)) as checkpointer,
    ):
        assert checkpointer.restore() == 2
        checkpointer.save(4).result(180)
    with holdfast.open(f"{moto_bucket.url}/copy-{last}/{RUN}@4"):
        pass

"""A trainer whose daemon has its root in a bucket: ranks read the bucket themselves where they may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from holdfast import Checkpointer
from holdfast.link import session
from holdfast_formats import naming
from holdfast_formats.errors import CorruptExtent, NoSuchCheckpoint
from tests.daemons import RunningDaemon
from tests.kit.bucket_roots import ROUND, upload
from tests.kit.objects import TestBucket


def tensor(step: int) -> torch.Tensor:
    return torch.arange(4000, dtype=torch.float32) * step


@pytest.fixture
def bucket(
    daemon: RunningDaemon, run: str, moto_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TestBucket]:
    """A daemon that says that its root is there, where copies of its checkpoints are; nothing is held in memory."""
    w = tensor(0)
    checkpointer = Checkpointer(run, {"model": {"w": w}}, at=daemon.socket, keep_last=10)
    for step in (1, 2):
        w.copy_(tensor(step))
        checkpointer.save(step, wait="durable")
    checkpointer.close()
    for name, value in moto_bucket.server.environment().items():
        monkeypatch.setenv(name, value)
    place = upload(daemon.root, moto_bucket, "team")
    plain = session.connect

    def connect(*arguments: object) -> object:
        made = plain(*arguments)
        return made._replace(welcome=made.welcome.model_copy(update={"root": place, "url": None}))

    monkeypatch.setattr(session, "connect", connect)
    yield moto_bucket


def restored(daemon: RunningDaemon, run: str, step: int | None = None) -> tuple[int | None, str, torch.Tensor]:
    state = {"model": {"w": torch.zeros(4000)}}
    checkpointer = Checkpointer(run, state, at=daemon.socket)
    try:
        found = checkpointer.restore(step)
        assert checkpointer.last_restore is not None
        return found, checkpointer.last_restore.source, state["model"]["w"]
    finally:
        checkpointer.close()


def test_it_is_read_there(bucket: TestBucket, daemon: RunningDaemon, run: str) -> None:
    """The newest step, and one by its number; the report says where the bytes came from."""
    for step in (None, 1):
        found, source, w = restored(daemon, run, step)
        assert (found, source) == (step or 2, "bucket") and torch.equal(w, tensor(step or 2))


def test_damage_is_named(bucket: TestBucket, daemon: RunningDaemon, run: str) -> None:
    """Nothing damaged is handed over."""
    key = f"team/{run}/data/step-00000001.a1.r{ROUND}/model.safetensors"
    data = bytearray(bucket.read(key))
    data[-5] ^= 1
    bucket.put(key, data)
    with pytest.raises(CorruptExtent) as caught:
        restored(daemon, run, 1)
    assert caught.value.members["tensor"] == "w"


def test_another_root_is_not_read(bucket: TestBucket, daemon: RunningDaemon, run: str) -> None:
    """A bucket with another mark, or that these keys may not read, is not taken for the daemon's."""
    bucket.put(f"team/{naming.ROOT_FILE}", b'{"id": "another", "inode": 0}')
    with pytest.raises(NoSuchCheckpoint, match="not visible here") as caught:
        restored(daemon, run)
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint

"""Reading a bucket over a network that fails: what is handed over is right, or an error names what failed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.read.checkpoint_root import root_of
from holdfast.read.root_index import RootIndex
from holdfast_formats.errors import CorruptExtent, StorageFailed
from tests.checkpoints import Arrays, build_root
from tests.kit.bucket_roots import upload
from tests.kit.objects import TestBucket
from tests.kit.objects_proxy import (
    ACCESS_DENIED,
    INTERNAL_ERROR,
    SLOW_DOWN,
    CutAnswer,
    Fault,
    FaultProxy,
    LoseAnswer,
    Request,
    faulty,
)

SIZE = 3 * 2**20
FAULTS: tuple[Fault, ...] = (INTERNAL_ERROR, SLOW_DOWN, LoseAnswer(), CutAnswer(0), CutAnswer(100), CutAnswer(200_000))


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    rng = np.random.default_rng(4)
    return {"model": {f"layers.{at}": rng.integers(0, 256, SIZE, np.uint8) for at in range(8)}, "extra": {}}


@pytest.fixture
def proxy(seaweedfs_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with faulty(seaweedfs_bucket.server.endpoint) as made:
        for name, value in seaweedfs_bucket.server.environment(made.endpoint).items():
            monkeypatch.setenv(name, value)
        yield made


@pytest.fixture
def place(seaweedfs_bucket: TestBucket, proxy: FaultProxy, arrays: Arrays, tmp_path: Path) -> str:
    """A root with three checkpoints."""
    build_root(tmp_path / "root", {"tiny": (1, 2, 3)}, arrays)
    return upload(tmp_path / "root", seaweedfs_bucket, "team")


def test_every_third_request_fails(place: str, proxy: FaultProxy, arrays: Arrays) -> None:
    """Requests are repeated, and all is as it was saved."""
    draw = random.Random(7)

    def choose(request: Request) -> Fault | None:
        return draw.choice(FAULTS) if draw.random() < 1 / 3 else None

    proxy.choose = choose
    with holdfast.open(f"{place}/tiny@latest") as checkpoint:
        assert checkpoint.step == 3
        for name, array in arrays["model"].items():
            assert np.array_equal(checkpoint.read(name), array)
        assert checkpoint.reader.verify() == []


def test_a_server_that_refuses(place: str, proxy: FaultProxy) -> None:
    """A policy without reading is told apart from a checkpoint that is not there, and is not damage."""
    with holdfast.open(f"{place}/tiny@2") as checkpoint:
        proxy.on(ACCESS_DENIED, "get", times=None)
        with pytest.raises(StorageFailed) as caught:
            checkpoint.read("layers.1")
    assert "s3:GetObject" in caught.value.hint and caught.value.members["answer"] == "403 AccessDenied"


def test_an_object_that_is_removed_while_it_is_read(
    place: str, proxy: FaultProxy, seaweedfs_bucket: TestBucket, arrays: Arrays
) -> None:
    """`aws s3 rm`: the error names the object, and the other checkpoints are as they were."""
    with holdfast.open(f"{place}/tiny@2") as checkpoint:
        for key in seaweedfs_bucket.sizes("team/tiny/data/step-00000002"):
            seaweedfs_bucket.delete(key)
        with pytest.raises(holdfast.CheckpointError, match=r"tiny@2: model\S*safetensors is gone, which tiny/commits"):
            checkpoint.read("layers.1")
    with closing(RootIndex(root_of(place))) as index:  # a list asks for commit objects alone
        assert [one.step for one in index.checkpoints("tiny").checkpoints] == [3, 2, 1]
    with pytest.raises(holdfast.CheckpointError, match="gone"), holdfast.open(f"{place}/tiny@2"):
        pass
    with holdfast.open(f"{place}/tiny@3") as checkpoint:
        assert np.array_equal(checkpoint.read("layers.1"), arrays["model"]["layers.1"])


def test_bytes_that_change_on_their_way(place: str, seaweedfs_bucket: TestBucket, arrays: Arrays) -> None:
    """An object of the same size with other bytes: the tensor is named, and its neighbours are read."""
    with holdfast.open(f"{place}/tiny@1") as checkpoint:
        tensor = checkpoint.manifest.tensors["model"]["layers.5"]
        (key,) = (key for key in seaweedfs_bucket.sizes("team/tiny/data/step-00000001") if key.endswith(f"/{tensor.file}"))
        data = bytearray(seaweedfs_bucket.read(key))
        data[tensor.start + SIZE // 2] ^= 4
        seaweedfs_bucket.put(key, data)
        with pytest.raises(CorruptExtent) as caught:
            checkpoint.read("layers.5")
        assert caught.value.members["tensor"] == "layers.5"
        assert np.array_equal(checkpoint.read("layers.4"), arrays["model"]["layers.4"])

"""Checkpoints that several tests of the client read, and both ways to a root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import Built, build
from tests.kit.bucket_roots import upload
from tests.kit.commands import no_service
from tests.kit.objects import TestBucket
from tests.serving import served

__all__ = ["no_service"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A checkpoint that tests only read."""
    return build(tmp_path_factory.mktemp("read") / "step-00000005")


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A checkpoint of the test's own."""
    return build(tmp_path / "step-00000005")


@pytest.fixture(params=["root", "url"])
def live_place(request: pytest.FixtureRequest, root: Path) -> Iterator[list[str]]:
    """The options for reading a file's `root` by either way, with what the test makes of it."""
    if request.param == "root":
        yield ["--root", str(root)]
        return
    with served(root) as running:
        yield ["--url", running.url]


@pytest.fixture(params=["root", "url", "bucket"])
def place(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The options for reading a file's `root`, or a copy of it in a bucket."""
    if request.param == "root":
        yield ["--root", str(root)]
    elif request.param == "url":
        with served(root) as running:
            yield ["--url", running.url]
    else:
        bucket: TestBucket = request.getfixturevalue("moto_bucket")
        for name, value in bucket.server.environment().items():
            monkeypatch.setenv(name, value)
        yield ["--root", upload(root, bucket, "team/checkpoints")]

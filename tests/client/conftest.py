"""Checkpoints that several tests of the client read, and both ways to a root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import Built, build
from tests.kit.commands import no_service
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
def place(request: pytest.FixtureRequest, root: Path) -> Iterator[list[str]]:
    """The options for reading a file's `root` by either way."""
    if request.param == "root":
        yield ["--root", str(root)]
        return
    with served(root) as running:
        yield ["--url", running.url]

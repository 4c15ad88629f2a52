"""Checkpoints that several tests of the client read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import Built, build


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A checkpoint that tests only read."""
    return build(tmp_path_factory.mktemp("read") / "step-00000005")


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A checkpoint of the test's own."""
    return build(tmp_path / "step-00000005")

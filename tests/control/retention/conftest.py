"""A root with one run, for tests of whole runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_service.storage import PosixTier
from tests.daemon.saver_world import saver_world
from tests.in_memory import in_memory

STEPS = [1, 2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a run of two checkpoints, whose ranks have gone."""
    root = tmp_path_factory.mktemp("saved") / "root"
    with saver_world(PosixTier(root)) as world:
        (rank,) = world.launch(1)
        for step in STEPS:
            rank.save(step)
            assert rank.wait(step).state == "committed"
        world.checked()
        rank.leave()
    return root


@pytest.fixture
def at(saved: Path) -> Iterator[Path]:
    """A copy of it, where no write waits for a disk."""
    with in_memory() as place:
        shutil.copytree(saved, place / "root", symlinks=True)
        yield place

"""E1: training that is killed again and again goes on bit by bit as if nobody had disturbed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.dcp.train import LAST
from tests.integrations.resuming import assert_equal, completed, killed

SCRIPT = "tests.integrations.dcp.train"


@pytest.mark.parametrize(("how", "world", "workers"), [("sync", 1, 2), ("sync", 2, 0), ("thread", 2, 0), ("process", 2, 0)])
def test_killed_runs_equal_the_undisturbed_one(tmp_path: Path, kills: int, how: str, world: int, workers: int) -> None:
    """Losses, rows and the final weights, moments and schedule; in the middle of epochs and across them."""
    words = ["--save", how, "--world", str(world), "--workers", str(workers)]
    whole = completed(SCRIPT, words, tmp_path / "whole", world)
    other = killed(SCRIPT, words, tmp_path / "killed", LAST, kills, seed=world + workers, world=world)
    assert_equal(whole, other)
    assert len(other.began) > kills and max(other.began) > 0, "no start went on from a checkpoint"

"""A training in Paddle that is killed at any moment and restored goes on as if nothing had happened, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.paddle import train
from tests.integrations.paddle.pair_suite import fork
from tests.integrations.resuming import assert_equal, completed, killed

MODULE = "tests.integrations.paddle.train"


@pytest.mark.parametrize("how", ["plain", "half"])
def test_a_killed_training_continues_exactly(tmp_path: Path, kills: int, how: str) -> None:
    """Losses, rows of the data, weights, masters, accumulators with the powers of beta, loss scale and random numbers."""
    whole = completed(MODULE, ["--how", how], tmp_path / "whole", by=fork)
    other = killed(MODULE, ["--how", how], tmp_path / "killed", train.STEPS, kills, seed=3, by=fork)
    assert len(other.began) == kills + 1
    assert max(other.began) > 0, other.began
    assert_equal(whole, other)

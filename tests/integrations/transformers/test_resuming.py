"""E1: a Trainer's script that is killed again and again does what it does undisturbed, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.resuming import assert_equal, completed, end, killed, start

SCRIPT = "tests.integrations.transformers.train"
CASES = {
    "mid-epoch": [],
    "workers": ["--workers", "2"],
    "draws": ["--drawn"],
    "draws, accumulation": ["--drawn", "--accumulate", "2", "--save-steps", "2"],
    "order from the global generator": ["--grouped", "--drawn"],
    "order from the global generator, workers": ["--grouped", "--workers", "2"],
    "epoch boundaries": ["--save", "epoch", "--rows", "6", "--epochs", "6", "--drawn"],
    "best": ["--evaluate", "--best"],
}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_training_does_what_an_undisturbed_one_does(case: str, tmp_path: Path, kills: int) -> None:
    arguments = CASES[case]
    whole = completed(SCRIPT, arguments, tmp_path / "whole")
    last = max(whole.steps)
    assert last >= 18 and len({str(lines) for lines in whole.steps.values()}) == last
    other = killed(SCRIPT, arguments, tmp_path / "killed", last, kills, seed=sum(map(ord, case)))
    assert_equal(whole, other)
    assert max(other.began) > 0  # something was resumed


@pytest.mark.parametrize("case", ["order from the global generator", "order from the global generator, workers"])
def test_an_epoch_that_a_resumed_training_began_is_taken_up(case: str, tmp_path: Path) -> None:
    """Killed after the second of three epochs of eleven steps, and again within the third one."""
    whole = completed(SCRIPT, CASES[case], tmp_path / "whole")
    for die_at in (23, 31):
        for rank in (ranks := start(SCRIPT, CASES[case], tmp_path / "killed", 1, die_at)):
            rank.wait()
        end(ranks)
    other = completed(SCRIPT, CASES[case], tmp_path / "killed")
    assert other.began == [0, 22, 30]
    assert_equal(whole, other)


def test_two_ranks(tmp_path: Path, kills: int) -> None:
    arguments = ["--drawn", "--save-steps", "2"]
    whole = completed(SCRIPT, arguments, tmp_path / "whole", world=2)
    assert max(whole.steps) == 18
    other = killed(SCRIPT, arguments, tmp_path / "killed", 18, kills, seed=5, world=2)
    assert_equal(whole, other)
    assert max(other.began) > 0

"""E1: a training that is killed again and again is, bit by bit, the one that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.resuming import assert_equal, completed, killed

SCRIPT = "tests.integrations.megatron.train"


@pytest.mark.parametrize(
    ("world", "arguments"),
    [(2, ("--tp", "2")), (2, ("--distributed", "--bf16")), (1, ("--fp16", "--distributed"))],
    ids=["tp=2", "dp=2 distributed bf16", "fp16"],
)
def test_a_killed_training_is_the_one_that_was_not(
    world: int, arguments: tuple[str, ...], kills: int, tmp_path: Path
) -> None:
    """Every step of every start has the loss and samples of the undisturbed run, and the end is the same."""
    whole = completed(SCRIPT, arguments, tmp_path / "whole", world)
    other = killed(SCRIPT, arguments, tmp_path / "killed", max(whole.steps), kills, seed=len(arguments), world=world)
    assert any(step > 0 for step in other.began), other.began
    assert_equal(whole, other)

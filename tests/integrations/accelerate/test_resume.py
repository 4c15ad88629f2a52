"""E1: a training that is killed again and again is, bit by bit, the one that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.resuming import assert_equal, completed, killed

SCRIPT = "tests.integrations.accelerate.train"
EPOCHS = 3


@pytest.mark.parametrize(
    ("world", "arguments"),
    [
        (1, ()),
        (1, ("--workers", "2")),
        (1, ("--accumulate", "3", "--noisy")),
        (1, ("--stateful",)),
        (1, ("--stateful", "--workers", "2")),
        (1, ("--stateful", "--noisy")),
        (2, ("--seedable", "--workers", "2")),
        (2, ("--noisy",)),
    ],
    ids=lambda value: " ".join(value).replace("--", "") or "plain" if isinstance(value, tuple) else f"{value} ranks",
)
def test_a_killed_training_is_the_one_that_was_not(
    world: int, arguments: tuple[str, ...], kills: int, tmp_path: Path
) -> None:
    """Every step of every start has the loss and rows of the undisturbed run, and the end is the same."""
    whole = completed(SCRIPT, arguments, tmp_path / "whole", world)
    other = killed(SCRIPT, arguments, tmp_path / "killed", max(whole.steps), kills, seed=len(arguments) + world, world=world)
    assert any(step > 0 for step in other.began), other.began
    assert_equal(whole, other)

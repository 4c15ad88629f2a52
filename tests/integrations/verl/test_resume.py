"""E1: an actor and a critic that are killed again and again are, bit by bit, those that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.resuming import assert_equal, completed, killed, outcome

SCRIPT = "tests.integrations.verl.train"


@pytest.mark.parametrize(
    ("world", "strategy"), [(1, "fsdp2"), (2, "fsdp2"), (2, "fsdp")], ids=["one rank", "FSDP2", "FSDP1"]
)
def test_a_killed_training_is_the_one_that_was_not(world: int, strategy: str, kills: int, tmp_path: Path) -> None:
    """Every step of every start has the loss and rows of the undisturbed run, and weights and moments are the same."""
    arguments = ("--strategy", strategy)
    whole = completed(SCRIPT, arguments, tmp_path / "whole", world)
    other = killed(SCRIPT, arguments, tmp_path / "killed", max(whole.steps), kills, seed=world, world=world)
    assert any(step > 0 for step in other.began), other.began
    assert_equal(whole, other)
    for role in ("actor", "critic"):
        linked = [path for path in (tmp_path / "killed" / "out").glob(f"*/{role}") if (path / "COMMIT").is_file()]
        assert len(linked) == 2, "max_ckpt_to_keep is 2"


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """E2: one rank loads what two have saved under FSDP1, and both roles go on from its step with the moments."""
    completed(SCRIPT, ("--strategy", "fsdp", "--last", "9"), tmp_path, world=2)
    completed(SCRIPT, ("--strategy", "fsdp2"), tmp_path, world=1)
    assert outcome(tmp_path / "record-0.jsonl").began == [0, 9]

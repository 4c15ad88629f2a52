"""E1: a training that is killed again and again is, bit by bit, the one that nobody disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.resuming import assert_equal, completed, killed

SCRIPT = "tests.integrations.lightning.train"
ONE = {
    "plain": "",
    "workers": "--workers 2",
    "persistent workers": "--workers 2 --persistent",
    "draws": "--noisy",
    "draws, accumulation": "--noisy --accumulate 3",
    "epochs": "--every-epoch",
    "steps": "--max-steps 60",
    "stateful": "--stateful",
    "stateful, draws": "--stateful --noisy",
    "stateful, workers": "--stateful --workers 2",
    "stream": "--stream",
    "stream, stateful": "--stream --stateful",
    "validation within epochs": "--validate --val-every 3",
    "validation, plateau": "--validate --plateau",
    "best": "--validate --best --val-every 6",
    "two callbacks": "--validate --top",
    "manual, two optimizers": "--manual",
    "averaged": "--ema --validate --val-every 5",
}
TWO = {"ddp": "--noisy", "ddp, workers": "--workers 2", "ddp, stateful": "--stateful", "fsdp2": "--strategy fsdp2"}


@pytest.mark.parametrize("case", ONE)
def test_a_killed_training_is_the_one_that_was_not(case: str, kills: int, tmp_path: Path) -> None:
    """Every step of every start has the loss and rows of the undisturbed run, and the end is the same."""
    _compare(ONE[case].split(), kills, tmp_path, 1)


@pytest.mark.parametrize("case", TWO)
def test_two_ranks(case: str, kills: int, tmp_path: Path) -> None:
    _compare([*TWO[case].split(), "--world", "2"], kills, tmp_path, 2)


def _compare(arguments: list[str], kills: int, work: Path, world: int) -> None:
    whole = completed(SCRIPT, arguments, work / "whole", world)
    assert len({str(lines) for lines in whole.steps.values()}) == max(whole.steps)
    other = killed(
        SCRIPT, arguments, work / "killed", max(whole.steps), kills, seed=sum(map(ord, "".join(arguments))), world=world
    )
    assert any(step > 0 for step in other.began), other.began
    assert_equal(whole, other)

"""E1: a training that is killed again and again ends as one that nobody disturbed, bit by bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.resuming import assert_equal, completed, killed

SCRIPT, STEPS = "tests.integrations.deepspeed.train", 20

RUNS = {
    "zero-1": (["--stage", "1"], 2),
    "zero-3": (["--stage", "3", "--workers", "2"], 2),
}
FEWER = {
    "zero-0": (["--stage", "0"], 1),
    "zero-0 fp16": (["--stage", "0", "--kind", "fp16"], 1),
    "zero-1 accumulated": (["--stage", "1", "--accumulate", "2"], 1),
    "zero-2 fp16": (["--stage", "2", "--kind", "fp16"], 2),
    "zero-3 fp16": (["--stage", "3", "--kind", "fp16"], 1),
    "zero-2 offloaded": (["--stage", "2", "--kind", "offloaded"], 1),
    "zero-3 offloaded": (["--stage", "3", "--kind", "offloaded"], 1),
    "zero-2 bf16": (["--stage", "2", "--kind", "bf16"], 2),
    "zero-3 bf16": (["--stage", "3", "--kind", "bf16"], 2),
    "bf16 optimizer": (["--stage", "1", "--kind", "bf16-accumulated"], 2),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_killed_run_is_the_run_that_nobody_disturbed(kind: str, tmp_path: Path, kills: int) -> None:
    """Two ranks, dropout, shuffled rows over several epochs, with and without workers of the loader."""
    arguments, world = RUNS[kind]
    arguments = [*arguments, "--steps", str(STEPS)]
    whole = completed(SCRIPT, arguments, tmp_path / "whole", world)
    assert_equal(whole, killed(SCRIPT, arguments, tmp_path / "killed", STEPS, kills, seed=len(kind), world=world))


@pytest.mark.parametrize("kind", FEWER)
def test_every_kind_of_engine_resumes(kind: str, tmp_path: Path) -> None:
    """Killed once, for each optimizer that DeepSpeed wraps around the user's."""
    arguments, world = FEWER[kind]
    arguments = [*arguments, "--steps", "10"]
    whole = completed(SCRIPT, arguments, tmp_path / "whole", world)
    again = killed(SCRIPT, arguments, tmp_path / "killed", 10, 1, seed=3, world=world)
    assert_equal(whole, again)
    assert len(again.began) == 2

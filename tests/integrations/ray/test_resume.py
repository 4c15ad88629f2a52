"""E1: a training whose workers are killed again and again, and started again by Ray, is the one that nobody disturbed."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast_formats import naming
from tests.integrations.environments import TOP
from tests.integrations.ray.train import LAST, RUN
from tests.integrations.resuming import START_S, Outcome, assert_equal, outcome

SCRIPT = "tests.integrations.ray.train"


def run(work: Path, *arguments: str, succeeds: bool = True) -> str:
    """Run the script to its end, and return what it printed."""
    work.mkdir(parents=True, exist_ok=True)
    about = os.environ | {"PYTHONPATH": str(TOP), "OMP_NUM_THREADS": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}
    about["TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"] = "1"  # of ranks that wait for a dead one, whom Ray kills after it
    command = [sys.executable, "-m", SCRIPT, "--work", str(work), *arguments]
    done = subprocess.run(
        command, env=about, cwd=TOP, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=START_S * 4
    )
    assert (done.returncode == 0) == succeeds, done.stdout[-6000:]
    return done.stdout


def records(work: Path, world: int) -> list[Outcome]:
    return [outcome(work / f"record-{rank}.jsonl") for rank in range(world)]


def deaths(work: Path) -> int:
    return len((work / "died.txt").read_text().splitlines())


def plan(kills: int, seed: int, last: int) -> list[str]:
    """When to die: half the time right after a step, else at any moment after it."""
    chance = random.Random(seed)
    steps = sorted(chance.randint(1, last - 8) for _ in range(kills))
    return [str(step) if chance.random() < 0.5 else f"{step}+{chance.uniform(0, 0.2):.3f}" for step in steps]


def directories(work: Path) -> list[Path]:
    """Ray's directories of checkpoints."""
    return [path for path in (work / "ray" / "experiment").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("world", "arguments"),
    [(1, ()), (1, ("--workers", "2")), (2, ()), (2, ("--from-ray",))],
    ids=["one rank", "workers 2", "two ranks", "two ranks, from Ray's checkpoint"],
)
def test_a_killed_training_is_the_one_that_was_not(
    world: int, arguments: tuple[str, ...], kills: int, tmp_path: Path
) -> None:
    """Every step of every start, on every rank, has the loss and rows of the undisturbed run; Ray keeps what it should."""
    last = LAST + 3 * kills  # while one death is awaited training goes on, and must not end before the others
    both = ("--world", str(world), "--last", str(last), *arguments)
    run(tmp_path / "whole", *both)
    deadly = plan(kills, len(arguments) + world, last)
    text = run(tmp_path / "killed", *both, "--pause", "0.03", "--die", *deadly)
    assert deaths(tmp_path / "killed") >= kills - 1  # the last one may be due when all is done
    assert f"ended at {last}" in text
    for whole, other in zip(records(tmp_path / "whole", world), records(tmp_path / "killed", world), strict=True):
        assert any(step > 0 for step in other.began), other.began
        assert_equal(whole, other)
    for path in directories(tmp_path / "killed"):
        assert (path / "COMMIT").is_file(), f"{path} leads to no checkpoint"
    assert len(directories(tmp_path / "killed")) == 2  # num_to_keep: nothing is left of the dead


def test_a_new_driver_goes_on_with_the_experiment(tmp_path: Path) -> None:
    """The same RunConfig started again: Ray gives back its last checkpoint, and training goes on from there."""
    run(tmp_path / "whole")
    run(tmp_path / "twice", "--last", "10")
    first = outcome(tmp_path / "twice" / "record-0.jsonl")
    assert f"ended at {LAST}" in run(tmp_path / "twice", "--from-ray")
    both = outcome(tmp_path / "twice" / "record-0.jsonl")
    assert both.began == [0, 10] and len(first.ends) == 1
    both.ends.pop(0)
    assert_equal(outcome(tmp_path / "whole" / "record-0.jsonl"), both)


def test_a_launch_that_the_environment_names_is_a_new_one_after_each_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HOLDFAST_LAUNCH is the same for all workers that Ray starts: none may go on with the answer of a dead one."""
    monkeypatch.setenv("HOLDFAST_LAUNCH", "job-7")
    run(tmp_path / "whole", "--world", "2")
    run(tmp_path / "killed", "--world", "2", "--pause", "0.03", "--die", "5", "9+0.1", "14")
    for whole, other in zip(records(tmp_path / "whole", 2), records(tmp_path / "killed", 2), strict=True):
        assert_equal(whole, other)


def test_a_save_that_fails_is_never_a_checkpoint_of_rays(tmp_path: Path) -> None:
    """Ranks whose weights differ cannot be committed: Ray ends with that error, and knows the checkpoints before it."""
    text = run(
        tmp_path, "--world", "2", "--differ", "6", "--failures", "0", "--pause", "0.3", "--keep", "10", succeeds=False
    )
    assert "ReplicasDiffer" in text
    steps = sorted(path.name.partition(".")[0] for path in directories(tmp_path))
    assert steps == [naming.step_directory(step) for step in (2, 4)]
    assert all((path / "COMMIT").is_file() for path in directories(tmp_path))
    assert not (tmp_path / "root" / naming.checkpoint_path(RUN, 6)).exists()

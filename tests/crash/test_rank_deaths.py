"""Trainers die by SIGKILL; what all of them had sealed is committed, anything less leaves no trace (I1, bar 3)."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from holdfast.read.directory_root import committed_steps
from holdfast_formats import naming
from tests.crash.launches import Ranks, check_sound
from tests.daemons import RunningDaemon, running, wait_until

SIZE = 3_000_001


def launch(daemon: RunningDaemon, *steps: str) -> Ranks:
    return Ranks(daemon.socket, steps * 2 if len(steps) == 1 else steps, SIZE, daemon.root)


def restores(daemon: RunningDaemon, step: int) -> None:
    """A new launch restores the step, which holds exactly what the ranks wrote."""
    ranks = launch(daemon, "999999!")
    ranks.wait_for(f"restored {step}")
    ranks.end()


def staged(root: Path) -> list[str]:
    directory = root / "r" / naming.STAGING
    return [entry.name for entry in directory.iterdir()] if directory.is_dir() else []


@pytest.fixture
def daemon(tmp_path: Path):
    """A daemon with nothing in it."""
    with running(tmp_path / "root") as daemon:
        yield daemon


def test_killed_after_all_sealed_the_step_is_committed(daemon: RunningDaemon) -> None:
    """Both ranks die right after their seal was taken: the daemon commits the step, and a new launch restores it."""
    world = launch(daemon, "1,2")
    world.wait_for("sealed 2", 0, 1)
    world.end()
    wait_until(lambda: committed_steps(daemon.root, "r") == [2, 1])
    check_sound(daemon.root, [1, 2], SIZE)
    restores(daemon, 2)


@pytest.mark.parametrize("ends", [("leased", "leased"), ("copied", "copied"), ("sealed", "leased"), ("copied", "sealed")])
def test_killed_before_all_sealed_the_round_leaves_no_trace(tmp_path: Path, ends: tuple[str, str]) -> None:
    """One rank short of complete: the previous checkpoint restores, and after the next start nothing is left."""
    with running(tmp_path / "root") as daemon:
        first = launch(daemon, "1")
        wait_until(lambda: committed_steps(daemon.root, "r") == [1])
        first.end()
        world = launch(daemon, *("5" if end == "sealed" else f"5!{end}" for end in ends))
        for rank, end in enumerate(ends):
            world.wait_for(f"{end} 5", rank)
        world.end()
        restores(daemon, 1)
        assert committed_steps(daemon.root, "r") == [1]
    with running(tmp_path / "root") as daemon:
        assert staged(daemon.root) == []
        check_sound(daemon.root, [1], SIZE)


def test_one_rank_dead_aborts_for_the_other(daemon: RunningDaemon) -> None:
    """A rank that dies before its seal frees the other's slot at once, so a survivor's later saves are not starved."""
    world = launch(daemon, "1,2,3,4", "1!leased")
    world.wait_for("leased 1", 1)
    world.kill(1)
    world.wait_for("sealed 3", 0)  # 2 may have begun before the death was noticed, and end with it
    world.end()
    restores(daemon, 0)
    assert committed_steps(daemon.root, "r") == [] and staged(daemon.root) == []


def test_kills_at_random_moments(daemon: RunningDaemon) -> None:
    """Whenever both ranks die: a step that both reported sealed is committed and sound, and no other is half there."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    done = 0
    for _ in range(5):
        world = launch(daemon, ",".join(str(done + 1 + i) for i in range(8)))
        lines = chance.randrange(1, 25)
        wait_until(lambda world=world, lines=lines: len(world.said[0]) >= lines)
        time.sleep(chance.uniform(0, 0.01))
        world.end()
        probe = launch(daemon, "999999!")
        wait_until(lambda probe=probe: all(probe.said))
        probe.end()
        committed = committed_steps(daemon.root, "r")
        assert world.steps("sealed") <= set(committed), f"seed {seed}"
        assert probe.said[0] == [f"restored {max([0, *committed])}"], f"seed {seed}"
        assert staged(daemon.root) == [], f"seed {seed}"
        done = max([0, *committed])
        check_sound(daemon.root, committed, SIZE)

"""Trainers die by SIGKILL; what all of them had sealed is committed, anything less leaves no trace (I1, bar 3)."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.read.root_directory import committed_steps, open_checkpoint
from holdfast_formats import naming
from tests.crash.rank_process import content
from tests.daemons import RunningDaemon, running, wait_until
from tests.forked import Forked

RANK_PROCESS = Path(__file__).with_name("rank_process.py")
SIZE = 3_000_001
PATIENCE_S = 120.0
_launches = itertools.count()


class World:
    """Two ranks that save the given steps; `pauses` says where each one waits to be killed."""

    def __init__(self, daemon: RunningDaemon, steps: str, pauses: tuple[str, str]) -> None:
        launch = f"launch-{next(_launches)}"
        self.ranks = [
            Forked([RANK_PROCESS, daemon.socket, "r", i, 2, launch, steps, SIZE, pause]) for i, pause in enumerate(pauses)
        ]

    def wait_for(self, rank: int, line: str) -> None:
        """Read a rank's output up to a line; a rank that never says it is killed after a while, which ends this."""
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        limit = threading.Timer(PATIENCE_S, self.ranks[rank].kill)
        limit.start()
        try:
            for said in stdout:
                if said.strip() == line:
                    return
        finally:
            limit.cancel()
        raise AssertionError(f"rank {rank} ended before it said {line!r}")

    def read_lines(self, rank: int, count: int) -> list[str]:
        """The next lines of a rank's output."""
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        return [stdout.readline().strip() for _ in range(count)]

    def kill(self) -> list[list[str]]:
        """SIGKILL every rank; returns the lines each of them had still to tell."""
        for process in self.ranks:
            process.send_signal(signal.SIGKILL)
        said = []
        for process in self.ranks:
            assert process.stdout is not None
            said.append(process.stdout.read().splitlines())
            process.stdout.close()
            process.wait()
        return said


def check_sound(root: Path, step: int) -> None:
    """A committed step holds exactly what the ranks wrote, proven by digests."""
    with open_checkpoint(root, None, "r", step) as reader:
        assert reader.verify() == []
        assert np.array_equal(reader.read("model", "w"), content(step, 0, 2 * SIZE))


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
    world = World(daemon, "1,2", ("", ""))
    world.wait_for(0, "sealed 2")
    world.wait_for(1, "sealed 2")
    world.kill()
    wait_until(lambda: committed_steps(daemon.root, "r") == [2, 1])
    check_sound(daemon.root, 2)
    resumed = World(daemon, "3", ("restored", "restored"))
    resumed.wait_for(0, "restored 2")
    resumed.wait_for(1, "restored 2")
    resumed.kill()


@pytest.mark.parametrize(
    ("pauses", "lines"),
    [
        (("leased", "leased"), ("leased 5", "leased 5")),
        (("copied", "copied"), ("copied 5", "copied 5")),
        (("sealed", "leased"), ("sealed 5", "leased 5")),
        (("copied", "sealed"), ("copied 5", "sealed 5")),
    ],
)
def test_killed_before_all_sealed_the_round_leaves_no_trace(
    tmp_path: Path, pauses: tuple[str, str], lines: tuple[str, str]
) -> None:
    """One rank short of complete: the previous checkpoint restores, and after the next start nothing is left."""
    with running(tmp_path / "root") as daemon:
        first = World(daemon, "1", ("", ""))
        wait_until(lambda: committed_steps(daemon.root, "r") == [1])
        first.kill()
        world = World(daemon, "5", pauses)
        for rank, line in enumerate(lines):
            world.wait_for(rank, line)
        world.kill()
        resumed = World(daemon, "6", ("restored", "restored"))
        resumed.wait_for(0, "restored 1")
        resumed.wait_for(1, "restored 1")
        resumed.kill()
        assert committed_steps(daemon.root, "r") == [1]
    with running(tmp_path / "root") as daemon:
        assert staged(daemon.root) == []
        assert committed_steps(daemon.root, "r") == [1]
        check_sound(daemon.root, 1)


def test_one_rank_dead_aborts_for_the_other(daemon: RunningDaemon) -> None:
    """A rank that dies before its seal frees the other's slot at once, so a survivor's later saves are not starved."""
    world = World(daemon, "1,2,3,4", ("", "leased"))
    world.wait_for(1, "leased 1")
    world.ranks[1].kill()
    world.wait_for(0, "sealed 3")  # 2 may have begun before the death was noticed, and end with it
    world.kill()
    probe = World(daemon, "9", ("restored", "restored"))
    probe.wait_for(0, "restored 0")
    probe.kill()
    assert committed_steps(daemon.root, "r") == [] and staged(daemon.root) == []


def test_kills_at_random_moments(daemon: RunningDaemon) -> None:
    """Whenever both ranks die: a step that both reported sealed is committed and sound, and no other is half there."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    done = 0
    for _ in range(5):
        world = World(daemon, ",".join(str(done + 1 + i) for i in range(8)), ("", ""))
        said = world.read_lines(0, chance.randrange(1, 13))
        time.sleep(chance.uniform(0, 0.01))
        rest = world.kill()
        sealed = [
            {int(line.split()[1]) for line in lines if line.startswith("sealed")} for lines in (said + rest[0], rest[1])
        ]
        probe = World(daemon, "999999", ("restored", "restored"))
        (restored,) = probe.read_lines(0, 1)
        probe.kill()
        committed = committed_steps(daemon.root, "r")
        assert sealed[0] & sealed[1] <= set(committed), f"seed {seed}"
        assert restored == f"restored {max([0, *committed])}", f"seed {seed}"
        assert staged(daemon.root) == [], f"seed {seed}"
        done = max([0, *committed])
        for step in committed[:2]:
            check_sound(daemon.root, step)

"""The daemon keeps an average and is killed, at named points and at any: not one bit of the average is another one."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from tests.crash.averaging_rank import DECAY, values
from tests.crash.launches import kill_all, started
from tests.daemons import RunningDaemon
from tests.forked import Forked

SIZE = 1_310_723  # five chunks and a bit, on one rank
RUN = "r"
POINTS = (
    *("before a fold", "mid chunk", "chunk in the journal", "chunk copied, not noted", "chunk noted"),
    *("folded, not recorded", "recorded, not freed", "freed", "before an average is saved", "average in the slot"),
)
_launches = itertools.count()


def serve(root: Path) -> RunningDaemon:
    daemon = RunningDaemon(root)
    started.append(daemon.process)
    return daemon


class _Masters(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))


def expected(steps: int, size: int) -> torch.Tensor:
    """What torch's own average on the trainer would be after so many steps."""
    model = _Masters(size)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    for step in range(1, steps + 1):
        model.w.data.copy_(values(step, size))
        averaged.update_parameters(model)
    found: torch.Tensor = averaged.module.w.data
    return found


class Trainers:
    """Ranks of one launch, and what they say."""

    def __init__(self, daemon: RunningDaemon, world: int, steps: int, saves: str, size: int = SIZE) -> None:
        launch = f"averages-{next(_launches)}"
        self.ranks = []
        for rank in range(world):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "HOLDFAST_LAUNCH": launch,
            }
            words = ["-m", "tests.crash.averaging_rank", daemon.socket, RUN, rank, world, launch, steps, saves, size]
            self.ranks.append(Forked(words, environment, talks=True))
            started.append(self.ranks[-1])

    def hear(self, line: str) -> None:
        """Wait until every rank has said this line."""
        for process in self.ranks:
            assert process.stdout is not None
            for said in process.stdout:
                if said.strip() == line:
                    break
            else:
                raise AssertionError(f"a rank ended before it said {line!r}")

    def end(self) -> None:
        for process in self.ranks:
            assert process.wait(180) == 0
            assert process.stdout is not None and process.stdin is not None
            process.stdout.close()
            process.stdin.close()

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            assert process.stdout is not None and process.stdin is not None
            process.stdout.close()
            process.stdin.close()


def check(root: Path, step: int, size: int = SIZE) -> None:
    """The checkpoint has the average of all steps up to its own, bit for bit, and says so."""
    with open_checkpoint(root, None, RUN, step) as reader:
        assert reader.verify() == []
        said = json.loads(reader.state)["groups"]["ema"]["average"]["all"]
        assert (said["n"], said["step"], said["dropped"], said["lost"]) == (step, step, 0, 0)
        assert torch.equal(torch.from_numpy(reader.read("ema", "w").copy()), expected(step, size))
        assert torch.equal(torch.from_numpy(reader.read("master", "w").copy()), values(step, size))


@pytest.fixture
def root(tmp_path: Path):
    """A directory to serve; afterwards nothing is left that a failed test started."""
    yield tmp_path / "root"
    kill_all()


def test_killed_twice_and_resumed_in_another_world(root: Path) -> None:
    """A run of a hundred steps: its daemon dies at two moments, its trainer goes on with other ranks."""
    size, daemon = 70_001, serve(root)
    first = Trainers(daemon, 1, 40, "40", size)
    first.hear("folded 17")
    daemon.kill()
    daemon = serve(root)
    first.end()
    check(root, 40, size)
    second = Trainers(daemon, 3, 100, "60,100", size)
    second.hear("restored 40")
    second.hear("folded 71")
    daemon.kill()
    daemon = serve(root)
    second.end()
    for step in (60, 100):
        check(root, step, size)
    assert daemon.stop() == 0


def test_trainers_that_are_killed_go_on_from_the_last_average(root: Path) -> None:
    """What was folded after the last checkpoint is gone with the state that it was of."""
    size, daemon = 5_003, serve(root)
    first = Trainers(daemon, 2, 1000, "10", size)
    first.hear("folded 13")
    first.kill()
    second = Trainers(daemon, 1, 20, "20", size)
    second.end()
    check(root, 20, size)
    assert committed_steps(root, RUN)[0] == 20
    assert daemon.stop() == 0


@pytest.mark.crash_slow
def test_a_thousand_steps(root: Path) -> None:
    """As above, for as long as an average takes to be one."""
    size, daemon = 10_007, serve(root)
    first = Trainers(daemon, 2, 500, "250,500", size)
    for step in (111, 333):
        first.hear(f"folded {step}")
        daemon.kill()
        daemon = serve(root)
    first.end()
    second = Trainers(daemon, 3, 1000, "1000", size)
    second.end()
    for step in (250, 500, 1000):
        check(root, step, size)
    assert daemon.stop() == 0

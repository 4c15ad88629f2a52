"""What one form of fleet's parallelism saves, others restore with equal whole tensors: weights, moments, powers of beta.
Random streams go on where they may: ranks of a tensor draw the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.paddle.pair_suite import PairSuite, fork, launch
from tests.integrations.resuming import end
from tests.suites.adapter_suite import Case

SCRIPT = "tests.integrations.paddle.fleet_worlds"
START_S = 900.0  # of an action, on a machine that is busy
# The kind and the number of ranks that save, and those that restore.
WORLDS = {
    ("plain", 1): [("tp", 2), ("v2", 2)],
    ("plain-half", 1): [("v2-half", 2), ("tp-half", 2)],
    ("dp", 2): [("plain", 1), ("tp", 2)],
    ("tp", 2): [("tp", 2), ("plain", 1), ("dp", 2)],
    ("tp-half", 2): [("plain-half", 1)],
    ("v1", 2): [("v1", 2), ("v2", 2)],
    ("v1-half", 2): [("v2-half", 2), ("plain-half", 1)],
    ("v2", 2): [("v2", 2), ("3", 2), ("plain", 1)],
    ("v2-half", 2): [("3-half", 2), ("plain-half", 1)],
    ("2", 2): [("2", 2), ("v1", 2)],
    ("3", 2): [("3", 2), ("tp", 2)],
    ("3-half", 2): [("3-half", 2), ("plain-half", 1)],
    ("pp", 2): [("pp", 2), ("pipeline", 1)],
    ("pipeline", 1): [("pp", 2)],
    ("tp.v1", 4): [("tp.v1", 4), ("plain", 1)],
    ("tp.pp", 4): [("tp.pp", 4), ("pp", 2)],
}


def act(action: str, work: Path, world: int, script: str = SCRIPT) -> None:
    ranks = fork(script, [action], work, world)
    try:
        for rank in ranks:
            rank.wait(timeout=START_S)
        told = "\n".join(path.read_text()[-3000:] for path in work.glob("output-*.txt"))
        assert all(rank.returncode == 0 for rank in ranks), told
    finally:
        end(ranks)


@pytest.mark.parametrize(("kind", "world"), WORLDS)
def test_other_ranks_restore_what_these_have_saved(kind: str, world: int, tmp_path: Path) -> None:
    act(f"make:{kind}:{kind}", tmp_path, world)
    for other, ranks in WORLDS[kind, world]:
        act(f"read:{other}:{kind}", tmp_path, ranks)
    assert (tmp_path / "done.txt").read_text().splitlines() == [f"{kind} {other}" for other, _ in WORLDS[kind, world]]


def test_stages_whose_shared_weight_differs_save_nothing(tmp_path: Path) -> None:
    act("differ:pp:run", tmp_path, 2)


class TestFleet(PairSuite):
    """The first is killed as often as --kills says; a start takes most of the time."""

    SCRIPT = "tests.integrations.paddle.fleet_train"
    KILLED = (
        Case("data parallelism", "--kind dp --steps 200 --every 3", 2),
        Case("split parameters", "--kind v2", 2, kills=2),
        Case("stage 1, masters", "--kind v1-half", 2, kills=2),
        Case("stage 2, masters", "--kind 2-half", 2, kills=2),
        Case("stage 3, masters", "--kind 3-half", 2, kills=2),
        Case("tensor parallelism, masters", "--kind tp-half", 2, kills=2),
        Case("pipeline, masters", "--kind pp-half", 2, kills=2),
        Case("tensor parallelism and stage 1", "--kind tp.v1", 4, kills=1),
        Case("tensor parallelism and pipeline", "--kind tp.pp", 4, kills=1),
    )


class TestLaunchedFleet(PairSuite):
    """By Paddle's launcher."""

    SCRIPT = TestFleet.SCRIPT
    START = staticmethod(launch)
    KILLED = (Case("split parameters, masters", "--kind v2-half --steps 200 --every 3", 2),)

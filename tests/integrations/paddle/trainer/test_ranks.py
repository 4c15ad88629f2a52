"""A Trainer of PaddleFormers in two ranks: killed, and restored by one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.paddle.pair_suite import PairSuite, fork_trainer, launch
from tests.integrations.resuming import Outcome, completed, outcome
from tests.suites.adapter_suite import Case

SCRIPT = "tests.integrations.paddle.trainer.ranks"
SPLIT = "--sharded --split --half --master-grad"
ENDED = "--steps 6"  # the last step is saved: a start that resumes there trains no more


class TestRanks(PairSuite):
    SCRIPT, START = SCRIPT, staticmethod(fork_trainer)
    KILLED = (
        Case("data parallelism, 200 steps", "--drawn --accumulate 2 --rows 88 --steps 200", 2),
        Case("data parallelism, draws", "--drawn --accumulate 2 --rows 88", 2, kills=3),
        Case("stage 1, evaluation, best", "--sharded --drawn --accumulate 2 --rows 88 --evaluate --best", 2, kills=3),
    )

    def check(self, whole: Outcome, work: Path) -> None:
        """The ranks train on different rows."""
        super().check(whole, work)
        other = outcome(work.parent / "whole" / "record-1.jsonl")
        assert all(whole.steps[step][0]["rows"] != other.steps[step][0]["rows"] for step in whole.steps)
        links = sorted(path.name for path in (work / "output").iterdir() if path.is_symlink() and path.exists())
        assert links == sorted(path.name for path in (work.parent / "whole" / "output").iterdir() if path.is_symlink())
        assert f"checkpoint-{max(whole.steps) // 2 * 2}" in links


class TestLaunchedRanks(TestRanks):
    """By Paddle's launcher."""

    START = staticmethod(launch)
    KILLED = (Case("split parameters, masters, 200 steps", f"{SPLIT} --accumulate 2 --rows 88 --steps 200", 2),)


@pytest.mark.parametrize("how", ["--sharded", SPLIT], ids=["stage 1", "split parameters"])
def test_one_rank_restores_equal_tensors_of_two(how: str, tmp_path: Path) -> None:
    words = f"{how} {ENDED}".split()
    saved = completed(SCRIPT, words, tmp_path, 2, fork_trainer)
    restored = completed(SCRIPT, words, tmp_path, 1, fork_trainer)
    assert restored.began == [0, 6]
    assert restored.ends[-1]["end"] == saved.ends[0]["end"]

"""A training with a Trainer of PaddleFormers that is killed."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.paddle.pair_suite import fork_trainer
from tests.integrations.resuming import Outcome
from tests.suites.adapter_suite import AdapterSuite, Case


class TestPaddleFormers(AdapterSuite):
    START = staticmethod(fork_trainer)
    SCRIPT = "tests.integrations.paddle.trainer.train"
    KILLED = (
        Case("200 steps", "--half --master-grad --accumulate 2 --evaluate --best --steps 200"),
        Case("mid-epoch", "--rows 22", kills=3),
        Case("draws, accumulation", "--drawn --accumulate 2", kills=3),
        Case("masters, evaluation, best", "--half --master-grad --accumulate 2 --evaluate --best", kills=3),
        Case("epoch boundaries", "--drawn --rows 8 --save-steps 4", kills=3),
        Case("a stream that is read again", "--stream --drawn", kills=3),
        Case("a stream that goes on, without skipping", "--stream --drawn --no-skip --accumulate 2", kills=3),
    )

    def check(self, whole: Outcome, work: Path) -> None:
        """It is long enough, and no two steps are alike."""
        assert len({str(lines) for lines in whole.steps.values()}) == max(whole.steps) >= 18

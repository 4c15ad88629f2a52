"""A training with a Trainer of PaddleNLP that is killed. PaddleFormers' tests show what both Trainers share."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.resuming import Outcome
from tests.suites.adapter_suite import AdapterSuite, Case


class TestPaddleNLP(AdapterSuite):
    """With few kills: a start takes most of its time to import PaddleNLP."""

    SCRIPT = "tests.integrations.paddle.trainer.train"
    KILLED = (
        Case("draws, accumulation", "--drawn --accumulate 2", kills=3),
        Case("masters, dropout, evaluation, best", "--half --master-grad --accumulate 2 --evaluate --best", kills=3),
        Case("epoch boundaries", "--drawn --rows 8 --save-steps 4", kills=3),
    )

    def check(self, whole: Outcome, work: Path) -> None:
        """It is long enough, and no two steps are alike."""
        assert len({str(lines) for lines in whole.steps.values()}) == max(whole.steps) >= 18

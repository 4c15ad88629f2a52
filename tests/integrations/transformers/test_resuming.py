"""A training with a Trainer that is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.resuming import Outcome, assert_equal, completed, end, start
from tests.suites.adapter_suite import AdapterSuite, Case


class TestTransformers(AdapterSuite):
    SCRIPT = "tests.integrations.transformers.train"
    KILLED = (
        Case("mid-epoch"),
        Case("workers", "--workers 2"),
        Case("draws", "--drawn"),
        Case("draws, accumulation", "--drawn --accumulate 2 --save-steps 2"),
        Case("order from the global generator", "--grouped --drawn"),
        Case("order from the global generator, workers", "--grouped --workers 2"),
        Case("epoch boundaries", "--save epoch --rows 6 --epochs 6 --drawn"),
        Case("best", "--evaluate --best"),
        Case("two ranks", "--drawn --save-steps 2", 2),
    )

    def check(self, whole: Outcome, work: Path) -> None:
        """It is long enough, and no two steps are alike."""
        assert len({str(lines) for lines in whole.steps.values()}) == max(whole.steps) >= 18

    @pytest.mark.parametrize("how", ["--grouped --drawn", "--grouped --workers 2"])
    def test_an_epoch_that_a_resumed_training_began_is_taken_up(self, how: str, tmp_path: Path) -> None:
        """Killed after the second of three epochs of eleven steps, and again within the third one."""
        whole = completed(self.SCRIPT, how.split(), tmp_path / "whole")
        for die_at in (23, 31):
            for rank in (ranks := start(self.SCRIPT, how.split(), tmp_path / "killed", 1, die_at)):
                rank.wait()
            end(ranks)
        other = completed(self.SCRIPT, how.split(), tmp_path / "killed")
        assert other.began == [0, 22, 30]
        assert_equal(whole, other)

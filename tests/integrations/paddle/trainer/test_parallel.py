"""A Trainer of PaddleFormers in the forms of fleet's parallelism: killed, and restored in other forms."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.paddle.pair_suite import fork_trainer
from tests.integrations.resuming import Outcome, assert_equal, completed, outcome
from tests.suites.adapter_suite import AdapterSuite, Case

SCRIPT = "tests.integrations.paddle.trainer.parallel"
SAME_ROWS = ("tp", "pp")  # all ranks train on the same rows
# What a form with so many ranks saves, others restore; with bfloat16 and masters, or float32.
HALF, FLOAT = "--half", ""
WORLDS = {
    ("plain", 1, FLOAT): [("tp", 2), ("pp", 2)],
    ("stage2", 2, FLOAT): [("stage3", 2), ("plain", 1)],
    ("stage3", 2, FLOAT): [("stage1", 2), ("plain", 1)],
    ("tp", 2, FLOAT): [("plain", 1), ("stage3", 2)],
    ("pp", 2, FLOAT): [("plain", 1), ("tp", 2)],
    ("plain", 1, HALF): [("v2", 2), ("tp", 2)],
    ("v2", 2, HALF): [("stage3", 2), ("plain", 1)],
    ("stage3", 2, HALF): [("stage2", 2)],
    ("tp", 2, HALF): [("plain", 1)],
    ("pp", 2, HALF): [("plain", 1)],
}


class TestParallel(AdapterSuite):
    SCRIPT, START = SCRIPT, staticmethod(fork_trainer)
    KILLED = (
        Case("stage 2", "--form stage2 --drawn", 2, kills=2),
        Case("stage 3", "--form stage3 --drawn", 2, kills=2),
        Case("tensor parallelism, evaluation, best", "--form tp --drawn --evaluate", 2, kills=2),
        Case("pipeline, evaluation, best", "--form pp --drawn --evaluate", 2, kills=2),
        Case("pipeline, tied embeddings", "--form pp --tied", 2, kills=2),
        Case("data parallelism, masters, best", "--form plain --drawn --half --evaluate", 2, kills=2),
        Case("stage 1, masters, best", "--form stage1 --drawn --half --evaluate", 2, kills=2),
        Case("stage 2, masters, best", "--form stage2 --drawn --half --evaluate", 2, kills=2),
        Case("stage 3, masters, best", "--form stage3 --drawn --half --evaluate", 2, kills=2),
        Case("tensor parallelism, masters, best", "--form tp --drawn --half --evaluate", 2, kills=2),
        Case("pipeline, masters, best", "--form pp --drawn --half --evaluate", 2, kills=2),
        Case("pipeline, tied embeddings, masters", "--form pp --tied --half", 2, kills=2),
    )

    def check(self, whole: Outcome, work: Path) -> None:
        """The other rank's steps and end are equal too, and only ranks that share data train on the same rows."""
        other = outcome(work.parent / "whole" / "record-1.jsonl")
        assert_equal(other, outcome(work / "record-1.jsonl"))
        form = whole.ends[0]["values"][-1]
        same = [whole.steps[step][0]["rows"] == other.steps[step][0]["rows"] for step in whole.steps]
        assert set(same) == {form in SAME_ROWS}


def drawn(rank: Outcome) -> list[str]:
    """The next numbers of its last start: of Paddle's generator, which dropout draws from, of Python and of numpy."""
    numbers: list[str] = rank.ends[-1]["values"][2:5]
    return numbers


@pytest.mark.parametrize(("form", "world", "precision"), WORLDS)
def test_other_forms_restore_equal_tensors(form: str, world: int, precision: str, tmp_path: Path) -> None:
    """Random streams go on: ranks of a tensor draw the same, stages the same rows, and other ranks other numbers."""
    words = ["--steps", "4", *precision.split()]  # the last step is saved: a start that resumes there trains no more
    saved = completed(SCRIPT, ["--form", form, *words], tmp_path, world, fork_trainer)
    for other, ranks in WORLDS[form, world, precision]:
        restored = completed(SCRIPT, ["--form", other, *words], tmp_path, ranks, fork_trainer)
        assert restored.began[-1] == 4
        assert restored.ends[-1]["end"] == saved.ends[0]["end"], other
        assert drawn(restored) == drawn(saved), other
        if ranks > 1:
            second = drawn(outcome(tmp_path / "record-1.jsonl"))
            alike = {"tp": drawn(restored), "pp": [*second[:1], *drawn(restored)[1:]]}
            assert (second == alike.get(other, second)) and (second != drawn(restored)) == (other != "tp"), other

"""The exam every framework's adapter takes. An adapter's test subclasses `AdapterSuite` and says how its script is started.

The script is a module that trains to its end from wherever the last save was, keeps a `recording.Record`, and is started
with a case's arguments and `--work DIRECTORY`, where it keeps everything.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integrations.resuming import Outcome, Start, assert_equal, completed, killed, start


class Case(NamedTuple):
    """A training: its title, arguments and ranks; `kills`, if it is not to be killed as often as --kills says."""

    title: str
    arguments: str = ""
    world: int = 1
    kills: int | None = None


class AdapterSuite:
    """Subclasses give the script and the cases in which it is killed."""

    SCRIPT: str
    KILLED: tuple[Case, ...]
    START: Start = staticmethod(start)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test for each case."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.KILLED, ids=[case.title for case in self.KILLED])

    def check(self, whole: Outcome, work: Path) -> None:
        """What else holds of an undisturbed training, and of the directory of one that was killed."""

    def test_a_killed_training_is_the_one_that_was_not(self, case: Case, kills: int, tmp_path: Path) -> None:
        """Killed again and again, every step of every start has the loss and rows of the undisturbed run, and the end is
        the same, bit by bit (E1).
        """
        words, many = case.arguments.split(), kills if case.kills is None else case.kills
        whole = completed(self.SCRIPT, words, tmp_path / "whole", case.world, self.START)
        last, seed = max(whole.steps), sum(map(ord, case.arguments)) + case.world
        other = killed(self.SCRIPT, words, tmp_path / "killed", last, many, seed=seed, world=case.world, by=self.START)
        assert len(other.began) > many and any(step > 0 for step in other.began), other.began
        assert_equal(whole, other)
        self.check(whole, tmp_path / "killed")

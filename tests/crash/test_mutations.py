"""Without any one fsync, digest check, fence or lease check some test fails (bar 3). Slow: each is a test run of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import ledger
from tests.crash.mutants import Mutation
from tests.crash.mutations import MUTATIONS, caught_by, copied_tree, problem_with

LANE = "mutations (survived: caught)"


@pytest.fixture(scope="module")
def tree() -> Iterator[Path]:
    """A copy of the tree, which is whole between two mutations."""
    with copied_tree() as copy:
        yield copy


def test_every_mutation_can_be_made() -> None:
    """What is to be taken away stands where it is looked for, once, and so do the tests."""
    assert [problem for problem in map(problem_with, MUTATIONS) if problem] == []
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.crash_slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "-"))
def test_a_mutation_is_caught(mutation: Mutation, tree: Path) -> None:
    """A test fails in the tree without it."""
    ledger.tried(LANE)
    found = caught_by(mutation, tree)
    assert found, f"nothing notices that there is no {mutation.name}"
    print(f"{mutation.name}: {found}")
    ledger.survived(LANE)

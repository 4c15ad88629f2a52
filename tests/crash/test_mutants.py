"""Modules that must not be wrong are changed in one place, and a test fails (bar 3). Slow: each is a test run of its own."""

from __future__ import annotations

import ast

import pytest

from tests.crash import ledger
from tests.crash.mutants import TESTS, TREE, caught_by, copied_tree, count, mutant

LANE = "mutants (survived: caught)"
TRIED = 8  # of each module, at even distances
CAUGHT_MIN = 0.6  # what is left of them changes nothing that a caller sees, or a message


def chosen(source: str) -> list[int]:
    """The mutants that are tried of a module."""
    return [at * count(source) // TRIED for at in range(TRIED)]


@pytest.mark.parametrize("module", TESTS)
def test_every_mutant_is_another_program(module: str) -> None:
    """And its tests are there."""
    source = (TREE / module).read_text()
    made = {mutant(source, number)[0] for number in chosen(source)}
    assert len(made) == TRIED and ast.unparse(ast.parse(source)) not in made
    assert all((TREE / test).exists() for test in TESTS[module])


@pytest.mark.crash_slow
@pytest.mark.parametrize("module", TESTS)
def test_mutants_are_caught(module: str) -> None:
    """Of mutants all over a module, all but a few; those that are not are printed."""
    source = (TREE / module).read_text()
    missed = []
    with copied_tree() as tree:
        for number in chosen(source):
            ledger.tried(LANE)
            if caught_by(tree, module, number):
                ledger.survived(LANE)
            else:
                missed.append(f"{module} {number} {mutant(source, number)[1]}")
    print("\n".join(missed))
    assert 1 - len(missed) / TRIED >= CAUGHT_MIN, missed

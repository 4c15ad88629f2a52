"""errors: the tree, its documented table, and the way over a wire and back."""

from __future__ import annotations

import copy
import json
import pickle
import re
from itertools import pairwise

import pytest

from holdfast_formats import errors
from holdfast_formats.errors import EXIT_STATUS, LEAVES, CheckpointError, from_problem

BRANCHES = tuple(EXIT_STATUS)


def subclasses(kind: type[CheckpointError]) -> set[type[CheckpointError]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


@pytest.mark.parametrize("leaf", LEAVES)
def test_every_leaf_comes_back_as_itself(leaf: type[CheckpointError]) -> None:
    """Through JSON, copy and a process boundary an error keeps class, detail, hint and members."""
    error = leaf("what happened", hint="what to do", file="a.safetensors", count=3)
    for rebuilt in (
        from_problem(json.loads(json.dumps(error.problem()))),
        copy.copy(error),
        pickle.loads(pickle.dumps(error)),
    ):
        assert type(rebuilt) is leaf
        assert (rebuilt.detail, rebuilt.hint, rebuilt.members) == (error.detail, error.hint, error.members)
        assert rebuilt.problem() == error.problem()


@pytest.mark.parametrize("leaf", LEAVES)
def test_every_leaf_is_a_whole_problem(leaf: type[CheckpointError]) -> None:
    """The RFC 9457 members are all there, and the text says detail, code and hint."""
    assert leaf("d", hint="h").problem() == {
        "type": f"/problems/{leaf.code}",
        "title": leaf.__name__,
        "status": leaf.status,
        "detail": "d",
        "code": leaf.code,
        "retryable": leaf.retryable,
        "hint": "h",
    }
    assert str(leaf("d", hint="h")) == f"d [{leaf.code}]\nhint: h"
    assert str(leaf("d")) == f"d [{leaf.code}]"


def test_the_tree_has_no_other_leaves() -> None:
    """LEAVES lists every class below a branch, once; codes are unique; every leaf has exactly one branch."""
    assert set(LEAVES) == subclasses(CheckpointError) - {CheckpointError, *BRANCHES}
    assert len({leaf.code for leaf in LEAVES}) == len(LEAVES)
    assert all(sum(issubclass(leaf, branch) for branch in BRANCHES) == 1 for leaf in LEAVES)
    assert CheckpointError.code not in {leaf.code for leaf in LEAVES}


def test_the_docstring_is_the_table() -> None:
    """The tree in the module's docstring names every leaf, in order, with its branch, code and status."""
    documented: list[tuple[str, str, str, int]] = []
    branch, branch_status = "", 0
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    (?P<bars>[│ ]*[├└]── )(?P<name>\w+)\s+(?P<rest>.*)", line)
        if found is None:
            continue
        status = re.search(r"\b(\d{3})\b", found["rest"])
        if found["bars"] in ("├── ", "└── "):
            branch, branch_status = found["name"], int(status[1]) if status else 0
        else:
            documented.append((branch, found["name"], found["rest"].split()[0], int(status[1]) if status else branch_status))
    parents = {leaf: next(b.__name__ for b in BRANCHES if issubclass(leaf, b)) for leaf in LEAVES}
    assert documented == [(parents[leaf], leaf.__name__, leaf.code, leaf.status) for leaf in LEAVES]


def test_branches_say_what_to_do() -> None:
    """Only what is unavailable is worth a retry; each branch has an exit status of its own, and 1 is for the rest."""
    assert {branch.__name__: status for branch, status in EXIT_STATUS.items()} == {
        "Refused": 2,
        "NotFound": 3,
        "Conflict": 4,
        "Damaged": 5,
        "Unavailable": 6,
        "Denied": 7,
    }
    for leaf in LEAVES:
        assert leaf.retryable == issubclass(leaf, errors.Unavailable)
        assert EXIT_STATUS[next(b for b in BRANCHES if issubclass(leaf, b))] == errors.exit_status(leaf("x"))
    assert errors.exit_status(CheckpointError("x")) == 1
    assert all(a != b for a, b in pairwise(sorted(EXIT_STATUS.values())))


@pytest.mark.parametrize("body", [{}, {"code": "no-such-code"}, {"code": None, "detail": 7}, {"self": 1, "code": "pinned"}])
def test_a_strange_problem_becomes_an_error_all_the_same(body: dict[str, object]) -> None:
    """Whatever a peer of another version reports is an error with a text, and its members are kept."""
    error = from_problem(body)
    assert isinstance(error, CheckpointError)
    assert error.detail
    assert error.members == {k: v for k, v in body.items() if k == "self"}

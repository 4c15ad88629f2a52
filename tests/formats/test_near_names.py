"""Errors about a name that does not exist suggest the nearest that does."""

from __future__ import annotations

import pytest

from holdfast_formats.near_names import did_you_mean, one_of


@pytest.mark.parametrize(
    ("name", "known", "question"),
    [
        ("optimizer", ("model", "optim"), "did you mean optim? see ls"),
        ("layers.2.mlp.upproj", ("layers.2.mlp.up_proj", "embed"), "did you mean layers.2.mlp.up_proj? see ls"),
        ("run-1", ("run-2", "run-3"), "did you mean run-3 or run-2? see ls"),
        ("zzz", ("model", "optim"), "see ls"),
        ("model", (), "see ls"),
    ],
)
def test_the_nearest_names(name: str, known: tuple[str, ...], question: str) -> None:
    """A few at most, the nearest first; none if all are far."""
    assert did_you_mean(name, known, "see ls") == question


def test_all_known_names_follow() -> None:
    """Where there are few, such as groups."""
    assert one_of("optimizer", ("model", "optim"), "groups") == "did you mean optim? groups: model, optim"
    assert one_of("optim", (), "groups") == "groups: none"

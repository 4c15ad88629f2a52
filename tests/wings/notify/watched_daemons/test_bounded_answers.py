"""Whatever field another machine says something in: it is of a length that it may have, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from holdfast_formats.rest.measurements import RunSummary
from holdfast_service.wings.notify.watched_daemons.bounded_answers import (
    LIST_MAX,
    NAME_MAX,
    TEXT_MAX,
    TIMES,
    MemoryAllowance,
    Unbounded,
)

PLENTY = 2**40


def fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Every field of a body and of the bodies inside it, with its type."""
    for name, field in model.model_fields.items():
        yield name, field.annotation
        for inner in inside(field.annotation):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from fields(inner)


def inside(annotation: Any) -> Iterator[Any]:
    yield annotation
    for one in get_args(annotation):
        yield from inside(one)


def test_every_time_in_a_summary_is_known_to_be_one() -> None:
    """Fields that say a time by their description or name: one that is added and not listed would be shown unchecked."""
    words = ("_since", "since", "created", "at", "until", "last_commit", "last_verified")
    texts = {name for name, kind in fields(RunSummary) if str in inside(kind)}
    assert {name for name in texts if name.endswith(words) and not name.endswith(("state", "what"))} == TIMES


@pytest.mark.parametrize("name", sorted({name for name, _ in fields(RunSummary)} | {"a_field_of_the_next_version"}))
def test_no_field_takes_what_it_likes(name: str) -> None:
    """A long string is cut or refused; a long list, and a number that is none, are refused, at any depth."""
    for wrap in (lambda value: {name: value}, lambda value: {"more": [{name: value}]}, lambda value: {name: [value]}):
        try:
            found = MemoryAllowance(PLENTY).bounded(wrap("x" * 100_000))
        except Unbounded:
            found = {}
        assert len(str(found)) < max(TEXT_MAX, NAME_MAX) + 100
        for wrong in ([0] * (LIST_MAX + 1), 2**63, -(10**400), math.nan, math.inf, {str(n): 0 for n in range(200)}):
            with pytest.raises(Unbounded):
                MemoryAllowance(PLENTY).bounded(wrap(wrong))


def test_what_is_said_counts() -> None:
    """By how much memory it takes, about, and not by its length alone: many empty objects are no less than a long text."""
    for said, least in (({}, 500), ([{}] * 100, 50_000), ({"text": "x" * 1000}, 2000), (["x"] * 1000, 50_000), (1, 24)):
        allowance = MemoryAllowance(PLENTY)
        assert allowance.bounded(said) == said
        assert PLENTY - allowance.left >= least

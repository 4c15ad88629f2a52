"""Results in words: every kind of value has its unit or its sentence, and none its brackets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.rest.job_labels import Fact, facts


def said(values: dict[str, Any]) -> list[Fact]:
    return facts(values, lambda count: f"{count:g} bytes", lambda seconds: f"{seconds:g} s")


@pytest.mark.parametrize(
    ("key", "value", "fact"),
    [
        ("bytes", 2000, ("Size", "2000 bytes")),
        ("done_bytes", 5, ("Done bytes", "5 bytes")),
        ("seconds", 1.5, ("It took", "1.5 s")),
        ("stall_s", 0.5, ("Stall", "0.5 s")),
        ("layouts", ["tp=2 rank 0", "pp=2 rank 1"], ("Restore tested in", "tp=2 rank 0; pp=2 rank 1")),
        ("repaired", [], ("Repaired", "none")),
        ("repaired", [{"file": "a", "source": "b"}], ("Repaired", "file a, source b")),
        ("dry_run", True, ("Dry run", "yes")),
        ("salvaged", {"runs": 3, "events": 2}, ("Kept from the old catalog", "runs 3, events 2")),
        ("ratio", 0.123456789, ("Ratio", "0.123457")),
        ("steps", list(range(25)), ("Steps", "; ".join(map(str, range(20))) + "; and 5 more")),
    ],
)
def test_fact(key: str, value: object, fact: tuple[str, str]) -> None:
    assert said({key: value}) == [Fact(*fact)]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab_", max_size=3), inner, max_size=3),
)


@given(st.dictionaries(st.text("ab_s", max_size=5), _VALUES, max_size=4))
def test_no_brackets(values: dict[str, Any]) -> None:
    """Whatever a job says, it is no list and no dictionary of Python's."""
    shown = said(values)
    assert len(shown) == sum(value is not None for value in values.values())
    assert not any(set(fact.text) & set("[]{}'") for fact in shown)

"""Patterns of names find their tensors and their numbers, and write names again."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.programs.names import NameIndex, pattern


def test_a_pattern_finds_names_and_numbers() -> None:
    """Numbers that are open have any value, others their own; `007` is no number."""
    index = NameIndex(["l.0.e.1.w2", "l.0.e.10.w2", "l.1.e.1.w2", "l.1.e.1.w3", "l.01.e.1.w2", "l.x.e.1.w2"])
    wanted = pattern("l.$LAYER_ID.e.$EXPERT_ID.w2", right=False)
    found = dict(index.find(wanted))
    assert found["l.0.e.10.w2"] == {"LAYER_ID": 0, "EXPERT_ID": 10}
    assert set(found) == {"l.0.e.1.w2", "l.0.e.10.w2", "l.1.e.1.w2"}
    assert all(wanted.name(values) == name for name, values in found.items())
    index.remove("l.0.e.1.w2")
    assert len(dict(index.find(wanted))) == 2 and len(index.names()) == 5


def test_one_variable_twice_is_one_number() -> None:
    """A name in which the two differ is not meant."""
    index = NameIndex(["a.1.b.1", "a.1.b.2"])
    assert dict(index.find(pattern("a.$LAYER_ID.b.$LAYER_ID", right=False))) == {"a.1.b.1": {"LAYER_ID": 1}}


def test_an_offset_goes_down_by_one() -> None:
    """Left n, right n − 1; and the other way round, if the sides are exchanged."""
    left, right = pattern("a.$LAYER_ID_OFFSET", right=False), pattern("b.$LAYER_ID_OFFSET", right=True)
    assert right.name(dict(NameIndex(["a.3"]).find(left))["a.3"]) == "b.2"
    assert left.name(dict(NameIndex(["b.2"]).find(right))["b.2"]) == "a.3"
    with pytest.raises(StateMismatch, match="no name for -1"):
        right.name({"LAYER_ID_OFFSET": 0})
    with pytest.raises(InvalidRequest, match="must begin a variable"):
        pattern("a.$x", right=False)

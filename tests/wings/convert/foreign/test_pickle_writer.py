"""What is written is read by Python as the same value."""

from __future__ import annotations

import datetime
import pickle
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest
from holdfast_service.wings.convert.foreign import pickle_writer
from holdfast_service.wings.convert.foreign.pickle_writer import GlobalCall, MadeObject, NamedGlobal, ObjectKeys

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
VALUES = st.recursive(
    ATOMS | st.frozensets(st.integers()) | st.sets(st.text()),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


@given(VALUES)
def test_plain_values(value: Any) -> None:
    """Any nesting of them, with texts that occur twice, in a protocol that knows the opcodes."""
    made = pickle_writer.dumps([value, value])
    assert pickle.loads(made) == [value, value]
    assert made[1] in (2, 3)


def test_large_numbers() -> None:
    """Also those for which the length of a number takes more than a byte."""
    for value in (2**31, -(2**31), -(2**31) - 1, 2**63, 1 << 3000, -(1 << 3000), 255, 256, -1):
        assert pickle.loads(pickle_writer.dumps(value)) == value


def test_objects() -> None:
    """Objects with a state, results of calls, and objects as keys, by the names of their classes."""
    delta = GlobalCall(NamedGlobal("datetime.timedelta"), (1, 2))
    made = MadeObject(NamedGlobal("fractions.Fraction"), (None, {"_numerator": 3, "_denominator": 4}))
    found = pickle.loads(pickle_writer.dumps({"a": delta, "b": made, "c": ObjectKeys([(delta, 1)]), "d": ObjectKeys([])}))
    days = datetime.timedelta(1, 2)
    assert found == {"a": days, "b": Fraction(3, 4), "c": {days: 1}, "d": {}}
    assert pickle.loads(pickle_writer.dumps(MadeObject(NamedGlobal("builtins.list")))) == []
    assert b"cdatetime\ntimedelta\n" in pickle_writer.dumps(delta)


def test_refused() -> None:
    """A type that it does not know, and nesting without end."""
    with pytest.raises(InvalidRequest, match="type object"):
        pickle_writer.dumps([object()])
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidRequest, match="deeper than 100"):
        pickle_writer.dumps(endless)

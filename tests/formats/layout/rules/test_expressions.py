"""rules.expressions: sizes as small sums over config.json's keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.expressions import CHARACTERS_MAX, VALUE_MAX, evaluate, names_in, parse

VALUES = {"a": 7, "b": 3, "zero": 0}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("12", 12),
        ("a", 7),
        ("a + b * 2", 13),
        ("(a + b) * 2", 20),
        ("a - b - 1", 3),
        ("a // b * b", 6),
        ("(a + 127) // 128", 1),
        ("c", None),
        ("c * 4 + a", None),
        ("c ?? a", 7),
        ("a ?? c", 7),
        ("c ?? d ?? b", 3),
        ("c ?? a // b", 2),
        ("(c ?? 2) * b", 6),
        ("c * 2 ?? 5", 5),
        (" a\t+b ", 10),
    ],
)
def test_an_expression_is_its_value(text: str, result: int | None) -> None:
    """Operators bind as in arithmetic, `??` most weakly; what needs a missing name is not known."""
    assert evaluate(parse(text), VALUES) == result


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is incomplete"),
        ("a +", "is incomplete"),
        ("(a", "is incomplete"),
        ("a)", "unmatched ')'"),
        ("()", "unexpected"),
        ("* a", "unexpected"),
        ("a b", "unexpected"),
        ("2 (a)", "unexpected"),
        ("-1", "unexpected"),
        ("9**9**9", "unexpected"),
        ("a / b", "cannot parse '/ b'"),
        ("__import__('os')", "cannot parse"),
        ("a.b", "cannot parse"),
        ("a" * (CHARACTERS_MAX + 1), f"{CHARACTERS_MAX} are allowed"),
    ],
)
def test_what_is_no_expression_is_refused(text: str, why: str) -> None:
    """Anything else is refused with what is wrong in it."""
    with pytest.raises(InvalidRequest, match="expression") as refused:
        parse(text)
    assert why in refused.value.detail


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a // zero", "7 // 0"),
        ("b - a", "evaluates to -4"),
        ("99999999999999999999", f"exceeds {VALUE_MAX}"),
        ("9999999 * 9999999 * 9999999 - 1", f"exceeds {VALUE_MAX}"),
    ],
)
def test_sizes_that_cannot_be_are_refused(text: str, why: str) -> None:
    """No division by zero, no negative size, and no number that grows without bound on the way."""
    with pytest.raises(InvalidRequest) as refused:
        evaluate(parse(text), VALUES)
    assert why in refused.value.detail


def test_names_are_those_asked_for() -> None:
    """Every name of an expression once, no operators and no numbers."""
    assert names_in(parse("(a + 2) * b ?? a")) == {"a", "b"}


@st.composite
def _sums(draw: st.DrawFn, depth: int = 3) -> str:
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(["a", "b", "1", "20"]))
    left, right = draw(_sums(depth - 1)), draw(_sums(depth - 1))
    return f"({left}){draw(st.sampled_from(['+', '-', '*', '//']))}({right})"


@given(_sums())
def test_arithmetic_is_pythons(text: str) -> None:
    """Whatever Python makes of a sum, that is its value here, where it is a size at all."""
    expected = _python(text)
    if len(text) > CHARACTERS_MAX or expected is None:
        with pytest.raises(InvalidRequest):
            evaluate(parse(text), VALUES)
    else:
        assert evaluate(parse(text), VALUES) == expected


def _python(text: str) -> int | None:
    try:
        value = eval(text, {"__builtins__": {}}, dict(VALUES))
    except ZeroDivisionError:
        return None
    return value if 0 <= value <= VALUE_MAX else None


@given(st.lists(st.sampled_from([*"ab()+-*/? 90", "??", "//", "_"]), max_size=CHARACTERS_MAX + 5).map("".join))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    """Random text ends in a bounded number, in "not known" or in a named error."""
    try:
        value = evaluate(parse(text), VALUES)
    except InvalidRequest:
        return
    assert value is None or 0 <= value <= VALUE_MAX

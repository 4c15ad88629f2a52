"""Expressions match what Python's own match, cannot take long, and are refused where they could."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.programs.regexes import STEPS_MAX, SafeExpression


@pytest.mark.parametrize(
    "text",
    [
        r"a\.b",
        r"model\.layers\.(\d+)\.(.*)",
        r"(q|k|v)_proj",
        r"[^.]+\.weight",
        r".*\.(\d+)\..*",
        r"a{2,3}b?c*",
        r"[a-c\d_-]+x",
    ],
)
def test_what_is_allowed_is_pythons(text: str) -> None:
    """An allowed expression matches as `re.fullmatch` does."""
    expression = SafeExpression(text)
    for name in ("a.b", "model.layers.3.mlp.w", "q_proj", "x.weight", "a.1.b", "aabcc", "b_2x", ""):
        found, wanted = expression.match(name), re.fullmatch(text, name)
        assert (found and found.groups()) == (wanted and wanted.groups())


@pytest.mark.parametrize(
    "text",
    [
        r"(a+)+b",
        r"(a|a)*",
        r"(a|ab)(c|bcd)",
        r"a*a*a*a*b",
        r".*.*.*x",
        r"(?:a)",
        r"((a))",
        r"(a)\1",
        r"a**",
        r"a{2}{3}",
        r"^a$",
        r"a|b",
        r"(a",
        r"a)",
        r"[a",
        r"[[:alpha:]]",
        r"\bx",
        r"a?a?a?a?aaa",
        "",
        "a" * 600,
    ],
)
def test_what_could_take_long_is_refused(text: str) -> None:
    """Nested repeats, repeats of groups, alternatives that begin alike, and everything that is not in the list."""
    with pytest.raises(InvalidRequest):
        SafeExpression(text)


def test_all_names_together_have_a_limit() -> None:
    """Two vague repeats on many long names end with an error that says what to write."""
    expression = SafeExpression(".*a.*b")
    names = STEPS_MAX // 1000**2
    for _ in range(names):
        assert expression.match("x" * 1000) is None
    with pytest.raises(LimitExceeded, match="takes too long"):
        expression.match("x" * 1000)
    with pytest.raises(LimitExceeded, match="1025 characters"):
        SafeExpression("a").match("a" * 1025)


@settings(deadline=2000)
@given(text=st.text(alphabet="ab.*+?{}2,()|[]^\\d", min_size=1, max_size=20), name=st.text(alphabet="ab2.", max_size=200))
def test_any_expression_is_refused_or_quick(text: str, name: str) -> None:
    """Whatever is accepted answers soon, and as Python does."""
    try:
        expression = SafeExpression(text)
    except InvalidRequest:
        return
    assert (expression.match(name) is None) == (re.fullmatch(text, name) is None)

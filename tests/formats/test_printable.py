"""visible: text of others, shown so that no terminal obeys it and no spreadsheet computes it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.printable import spreadsheet_cell, visible, visible_json, visible_lines

STEERS = "\x1b\x9b\x7f\u202e\u2066\ufeff\0\r"


@given(st.text() | st.text(STEERS + "ab\n"))
def test_nothing_steers(text: str) -> None:
    """Whatever it says; what is plain stays as it is, and on several lines these stay lines."""
    for shown in (visible(text), visible_lines(text), spreadsheet_cell(text)):
        assert not set(shown) & set(STEERS)
        shown.encode()
    assert "\n" not in visible(text) and visible_lines(text).count("\n") == text.count("\n")
    if text.isascii() and text.isprintable():
        assert visible(text) == visible_lines(text) == text


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@a", "\n=1", "\uff1d1", "\uff0b1", "\uff0d1", "\uff20a"])
def test_no_cell_is_a_formula(text: str) -> None:
    assert spreadsheet_cell(text) == f"'{text}" and spreadsheet_cell(f"a{text}") == f"a{text}"


@given(st.text())
def test_json_means_the_same(text: str) -> None:
    """JSON is escaped where a terminal would obey it, and stays the same document."""
    if any("\ud800" <= one <= "\udfff" for one in text):
        return
    escaped = visible_json(json.dumps({"a": text}, ensure_ascii=False))
    assert json.loads(escaped) == {"a": text}
    assert not set(escaped) & set("\x7f\x9b\u202e\u2066\ufeff")

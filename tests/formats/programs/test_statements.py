"""Statements are read as they are meant, and what cannot be meant is refused by line and column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import CheckpointError, InvalidRequest
from holdfast_formats.programs import statements
from holdfast_formats.programs.statements import parse_statements


def test_every_form_is_read() -> None:
    """Comments, empty lines, lines that go on, ranges, attributes with and without spaces."""
    found = parse_statements(
        "# a comment\n\n  a^T -> b  # another\nq, k,\n   v ->\n"
        " qkv, fused_qkv, num_heads = {heads}, num_key_value_groups=2, axis = 0\n"
        "e[0:3] -> f, stack\na->b,permute=\"[1,0]\"\nx -> y, 'bfloat16'\n_ -> z, shape=[2, {heads}], dtype='float32'\n"
        "/a\\.(.*)/ -> /b\\/\\1/\nw -> u, slice=[0:{heads}, :]\n* -> *\n",
        ["heads"],
    )
    assert [one.line for one in found] == [3, 4, 7, 8, 9, 10, 11, 12, 13]
    assert found[0].left[0].turned and not found[0].right[0].turned
    assert [operand.pattern and operand.pattern.text for operand in found[1].left] == ["q", "k", "v"]
    assert found[1].words == {"fused_qkv"} and found[1].numbers["num_heads"] == ("heads",)
    assert [operand.pattern and operand.pattern.text for operand in found[2].left] == ["e_0", "e_1", "e_2"]
    assert found[3].permute == (1, 0)
    assert found[4].texts == {"dtype": "bfloat16"}
    assert found[5].left[0].nothing and found[5].lists["shape"] == ((2,), ("heads",))
    assert found[6].right[0].template == "b/\\1"
    assert found[7].slices == (((0,), ("heads",)), (None, None))
    assert found[8].left[0].rest


@pytest.mark.parametrize(
    ("text", "column", "what"),
    [
        ("a", 2, "-> followed by the resulting tensors is missing"),
        ("a -> ", 5, "a tensor's name is missing"),
        ("a = b", 3, "-> followed by the resulting tensors was expected, not '='"),
        ("a => b", 4, "cannot read '> b'"),
        ("a -> b, axis=", 14, "the value of axis is missing"),
        ("a -> b, axes=1", 9, "there is no attribute 'axes'"),
        ("a -> b, axis=x", 14, "'x' is not a number"),
        ("a -> b, axis={y}", 14, "'y' is not in"),
        ("a -> b, axis=\u00b2", 14, "is not a number"),
        ("a -> b, permute=[\u00b2]", 17, "not an order of dimensions"),
        (f"a -> b, permute=[{'1' * 5000}]", 17, "not an order of dimensions"),
        ("a -> b, axis=1, axis=2", 17, "axis appears twice"),
        ("a, b -> c, d", 1, "cannot map many to many"),
        ("a.$LAYER -> b", 1, r"has \$LAYER"),
        ("a.1$LAYER_ID -> b", 1, "no other number may follow or precede"),
        ("a.*.* -> b", 1, r"more than one \*"),
        ("_ -> _", 1, "a new tensor is written"),
        ("a, * -> b", 1, "means all other names"),
        ("/a/, b -> c", 1, "must be alone"),
        ("a -> /b/", 1, "needs an expression on the left"),
        ("/(a|ab)c/ -> b", 1, "none may begin with another"),
        ("a, b, a -> c", 1, "'a' appears twice"),
        ("a[0:0] -> b", 2, "is not a range"),
        ("a -> b, num_heads=4", 1, "num_heads does nothing"),
        ("a -> b, zeros", 1, "zeros does nothing"),
        ("a -> b, rotary=pairs, num_heads=2", 1, "halves or interleaved"),
        ("a -> b, c, stack, fused_ffn", 1, "exclude each other"),
        ("a -> b ; c", 8, "cannot read"),
    ],
)
def test_errors_say_where(text: str, column: int, what: str) -> None:
    """Line, column, what is wrong, and a hint."""
    with pytest.raises(InvalidRequest, match=what) as caught:
        parse_statements(f"x -> y\n{text}", ["heads"])
    assert caught.value.detail.startswith("line 2, column ")
    assert (caught.value.members["line"], caught.value.members["column"]) == (2, column)
    assert caught.value.hint


@given(text=st.text(alphabet="ab._$*->,=[]{}^T/\\ \n'\"#0123(|)", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text causes anything but the errors that say what is wrong with it."""
    try:
        parse_statements(text, [])
    except CheckpointError as problem:
        assert isinstance(problem, InvalidRequest)


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, statements and ranges have limits."""
    monkeypatch.setattr(statements, "STATEMENTS_MAX", 3)
    assert len(parse_statements("a -> b\n" * 3, [])) == 3
    with pytest.raises(InvalidRequest, match="line 4: there are more than 3 statements"):
        parse_statements("a -> b\n" * 4, [])
    with pytest.raises(InvalidRequest, match="more than 16777216 bytes"):
        parse_statements("#" * (2**24 + 1), [])
    with pytest.raises(InvalidRequest, match="not a range of 1 to 4096"):
        parse_statements("a[0:5000] -> b", [])

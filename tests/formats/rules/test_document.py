"""rules.document: what a rules file may say."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.rules import choose
from holdfast_formats.rules.document import TEXT_BYTES_MAX, check, decode


def test_a_text_becomes_plain_values() -> None:
    """TOML as text and as bytes gives the same values."""
    text = 'name = "mine"\n[sizes]\nhidden = "hidden_size"\n'
    assert decode(text) == decode(text.encode()) == {"name": "mine", "sizes": {"hidden": "hidden_size"}}


@pytest.mark.parametrize(
    "text",
    [
        b"name = ",
        b"\xff\xfe",
        b"a = " + b"[" * 100_000,
        b"a = " + b"9" * 10_000,
        b"[a]\n[a]\n",
    ],
)
def test_what_is_no_toml_is_refused(text: bytes) -> None:
    """Broken text, no UTF-8, nesting beyond all depth and numbers beyond all length end in one named error."""
    with pytest.raises(InvalidRequest, match="the rules are no TOML"):
        decode(text)


def test_a_text_too_long_is_refused_unread() -> None:
    """A rules file has a limit."""
    with pytest.raises(InvalidRequest, match=f"{TEXT_BYTES_MAX} are allowed"):
        decode("#" * (TEXT_BYTES_MAX + 1))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "'?': Object missing required field `name`"),
        ({"name": 3}, r"'\?': Expected `str`, got `int` - at `\$.name`"),
        ({"name": "Mine!"}, "'Mine!': Expected `str` matching regex"),
        ({"name": "mine", "tensor": []}, "'mine': Object contains unknown field `tensor`"),
        ({"name": "mine", "tensors": [{"name": "a", "cutt": 1}]}, r"unknown field `cutt` - at `\$.tensors\[0\]`"),
        ({"name": "mine", "tensors": [{"name": "a", "cut": -1}]}, r"`int` >= 0 - at `\$.tensors\[0\].cut`"),
        ({"name": "mine", "tensors": [{"name": "a", "cut": True}]}, "got `bool`"),
        ({"name": "mine", "tensors": [{"name": "a", "otherwise": "shrug"}]}, "Invalid enum value 'shrug'"),
        ({"name": "mine", "tensors": [{"name": "a", "part": ["{layer}"]}]}, "matching regex"),
        ({"name": "mine", "fusions": [{"kind": "qkv", "name": "a"}]}, "missing required field `of`"),
        ({"name": "mine", "fusions": [{"kind": "both", "name": "a", "of": ["b"]}]}, "Invalid enum value 'both'"),
        ({"name": "mine", "ties": [{"alias": "a", "target": "b"}]}, "missing required field `when`"),
        ({"name": "mine", "scales": {"suffix": "_s", "block": 0}}, "`int` >= 1"),
        ({"name": "mine", "root": []}, "length >= 1"),
    ],
)
def test_keys_and_kinds_are_checked_by_name(values: dict[str, Any], why: str) -> None:
    """Every unknown, missing or ill-typed key is refused with the table and the key's path."""
    with pytest.raises(InvalidRequest, match=f"rules table .*{why}"):
        check(values)


TEXTS = st.one_of(
    st.sampled_from(
        ["a.{layer}.b", "{root}x", "{part}y", "a.{expert}.c", "hidden", "heads * 2", "7 // 0", "llama", "", "{", "x" * 600]
    ),
    st.text(max_size=8),
)
SIZES = st.one_of(TEXTS, st.integers(-2, 2**60))
ODD = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), TEXTS, st.lists(TEXTS, max_size=2))


def _entries(keys: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(
        st.fixed_dictionaries({}, optional={key: st.one_of(value, value, value, ODD) for key, value in keys.items()}),
        max_size=3,
    )


TENSORS = _entries(
    {
        "name": st.one_of(TEXTS, st.lists(TEXTS, max_size=3)),
        "part": st.lists(TEXTS, max_size=2),
        "shape": st.lists(SIZES, max_size=3),
        "cut": st.integers(0, 3),
        "units": SIZES,
        "stage": st.sampled_from(["first", "last", "every", "layer"]),
        "vocabulary": st.booleans(),
    }
)
FUSIONS = _entries(
    {
        "kind": st.sampled_from(["qkv", "gate_up", "experts"]),
        "name": TEXTS,
        "of": st.lists(TEXTS, min_size=1, max_size=3),
        "heads": st.lists(SIZES, min_size=2, max_size=2),
        "found": st.sampled_from(["heads", "groups"]),
    }
)
TABLES = st.fixed_dictionaries(
    {"name": st.one_of(st.just("mine"), st.just("mine"), ODD)},
    optional={
        "extends": st.one_of(st.sampled_from(["llama", "experts", ["llama", "experts"]]), ODD),
        "root": st.lists(TEXTS, max_size=2),
        "marks": st.lists(TEXTS, max_size=2),
        "sizes": st.dictionaries(st.sampled_from(["hidden", "heads", "layers"]), SIZES, max_size=3),
        "tensors": TENSORS,
        "fusions": FUSIONS,
        "ties": _entries({"alias": TEXTS, "target": TEXTS, "when": TEXTS}),
        "synonyms": _entries({"names": st.lists(TEXTS, min_size=2, max_size=3)}),
        "scales": st.fixed_dictionaries({"suffix": TEXTS, "block": st.integers(-1, 200)}),
        "huh": ODD,
    },
)


@settings(max_examples=150)
@given(TABLES, st.dictionaries(st.sampled_from(["hidden_size", "num_attention_heads"]), st.one_of(st.integers(-1, 99), ODD)))
def test_any_table_is_rules_or_refused(table: dict[str, Any], config: dict[str, Any]) -> None:
    """Random tables over random configs give rules that answer, or a named error, and nothing else."""
    try:
        rules = choose(config, ["a.1.b", "x"], extra=table)
    except InvalidRequest:
        return
    for name in ("a.1.b", "x", "model.layers.0.self_attn.q_proj.weight"):
        rules.rule(name), rules.fusion(name), rules.fusions(name), rules.synonyms(name)


@given(st.one_of(st.binary(max_size=60), st.text(st.sampled_from([*'[]{}="a.1\n#']), max_size=60).map(str.encode)))
def test_any_bytes_are_values_or_refused(data: bytes) -> None:
    """Random bytes are TOML or a named error."""
    with suppress(InvalidRequest):
        assert isinstance(decode(data), dict)


def test_a_table_that_would_grow_beyond_bounds_is_refused_at_once() -> None:
    """Sixty-four roots times sixty-four parts times a thousand entries are counted, not written out."""
    words = [f"w{i}." for i in range(64)]
    entry = {"name": "{root}{part}a.{layer}", "part": words}
    started = time.process_time()
    with pytest.raises(InvalidRequest, match="4096000 names"):
        choose(None, [], extra={"name": "huge", "root": words, "tensors": [entry] * 1000})
    assert time.process_time() - started < 1

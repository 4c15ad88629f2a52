"""rules.document: what a rules file may say."""

from __future__ import annotations

import time
from contextlib import suppress
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules import choose
from holdfast_formats.layout.rules.document import TEXT_BYTES_MAX, check, decode


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
    with pytest.raises(InvalidRequest, match="the rules are not valid TOML"):
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


NAMES = st.sampled_from(
    ["a.{layer}.b", "a.{layer}.{part}", "{root}x", "a.{layer}.{expert}.c", "a.{layer}.d", "x", "a.{layr}"]
)
WORDS = st.lists(st.sampled_from(["b", "d", "w.", "", "{layer}", "7"]), max_size=2)
SIZES = st.one_of(st.sampled_from(["hidden", "heads * 2", "hidden - 5", "7 // 0", "heads", "("]), st.integers(-1, 99))
ODD = st.one_of(
    st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=4), st.lists(st.text(max_size=2), max_size=2)
)


def _entries(needed: dict[str, Any], others: dict[str, Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(st.fixed_dictionaries(needed, optional=others), max_size=3)


TABLES = st.fixed_dictionaries(
    {
        "name": st.just("mine"),
        "sizes": st.fixed_dictionaries({"hidden": st.just("hidden_size"), "heads": st.just("heads ?? 4")}),
        "tensors": _entries(
            {"name": st.one_of(NAMES, st.lists(NAMES, max_size=2)), "stage": st.sampled_from(["first", "every"])},
            {"part": WORDS, "shape": st.lists(SIZES, max_size=3), "cut": st.integers(0, 1), "units": SIZES},
        ),
    },
    optional={
        "extends": st.sampled_from(["llama", ["llama", "experts"]]),
        "root": WORDS,
        "marks": st.lists(NAMES, max_size=2),
        "fusions": _entries(
            {
                "kind": st.sampled_from(["qkv", "gate_up", "experts"]),
                "name": st.sampled_from(["a.{layer}.f", "a.{layer}.{expert}.f"]),
                "of": st.lists(NAMES, min_size=1, max_size=3),
            },
            {"part": WORDS, "heads": st.just(["heads", "heads"]), "found": st.sampled_from(["heads", "groups"])},
        ),
        "ties": _entries({"alias": NAMES, "target": NAMES, "when": st.just("tie")}, {"default": st.booleans()}),
        "synonyms": _entries({"names": st.lists(NAMES, min_size=2, max_size=3)}, {"part": WORDS}),
        "scales": st.fixed_dictionaries({"suffix": st.just("_s"), "block": st.integers(0, 200)}),
    },
)


def _answers(table: dict[str, Any], config: dict[str, Any]) -> None:
    """Rules of this table answer, or there are none because of a named error."""
    try:
        rules = choose(config, ["a.1.b", "x"], extra=table)
    except InvalidRequest:
        return
    for name in ("a.1.b", "a.1.2.c", "x", "model.layers.0.self_attn.q_proj.weight"):
        rule = rules.rule(name)
        assert rule is None or rule.dimension is None or rule.shape is None or rule.dimension < len(rule.shape)
        for fused in (*rules.fusions(name), *filter(None, [rules.fusion(name), rules.stored(name)])):
            assert all(rules.rule(part) is not None for part in fused.of)
        assert name not in rules.synonyms(name)


@given(
    TABLES,
    st.fixed_dictionaries({}, optional={"hidden_size": st.one_of(st.integers(-1, 99), ODD), "heads": st.integers(0, 9)}),
)
def test_any_table_is_rules_or_refused(table: dict[str, Any], config: dict[str, Any]) -> None:
    """Random tables over random configs give rules that answer, or a named error, and nothing else."""
    _answers(table, config)


@given(st.data())
def test_a_sound_table_with_one_value_changed_is_rules_or_refused(data: st.DataObject) -> None:
    """Whatever stands in the place of any value of a packaged table, the end is rules or a named error."""
    text = (files("holdfast_formats.layout.rules") / "tables" / "gpt_neox.toml").read_bytes()
    table = decode(text) | {"name": "mine"}
    place: Any = table
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(st.one_of(ODD, NAMES, SIZES, WORDS))
    _answers(table, {"hidden_size": 16, "num_attention_heads": 4})


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

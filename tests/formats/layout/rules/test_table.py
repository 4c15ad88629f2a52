"""rules.table: entries of a table checked against each other, and tables that extend others."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.rules.document import check
from holdfast_formats.layout.rules.patterns import compile_pattern
from holdfast_formats.layout.rules.table import RuleTable, compile_table

Q, K, V = ({"name": f"l.{{layer}}.{part}", "shape": ["rows", "hidden"], "cut": 0} for part in "qkv")
E = {"name": "l.{layer}.e.{expert}.up", "shape": ["hidden"]}
QKV = {
    "kind": "qkv",
    "name": "l.{layer}.qkv",
    "of": ["l.{layer}.q", "l.{layer}.k", "l.{layer}.v"],
    "heads": ["heads", "heads"],
}
SIZES = {"hidden": "hidden_size", "rows": "heads * 8", "heads": "heads"}


def _table(*documents: dict[str, Any]) -> RuleTable:
    """The table of these documents, nearest first."""
    return compile_table([check({"name": f"t{i}", **doc}) for i, doc in enumerate(documents)])


def _with(**changes: Any) -> dict[str, Any]:
    return {"sizes": SIZES, "tensors": [Q, K, V, E], "fusions": [QKV]} | changes


def test_a_sound_table_is_compiled() -> None:
    """Tensors are cut by tp, an expert's by etp; a layer's tensor goes with its layer."""
    table = _table(_with(tensors=[Q, K, V, {**E, "cut": 0}]))
    query, up = table.tensors[compile_pattern(Q["name"])], table.tensors[compile_pattern("l.{layer}.e.{expert}.up")]
    assert (query.by, query.stage, query.otherwise, query.cut) == ("tp", "layer", "refuse", 0)
    assert up.by == "etp"
    assert list(table.fusions) == [compile_pattern("l.{layer}.qkv")]
    assert table.has_experts


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        ({"name": "norm"}, "'norm' has no {layer}, so its stage must be given"),
        ({"name": "norm", "stage": "layer"}, "'norm' has stage = \"layer\", but no {layer}"),
        ({"name": "l.{layer}.x", "units": "heads"}, "has units, but no `cut` dimension"),
        ({"name": "l.{layer}.x", "vocabulary": True}, "has vocabulary, but no `cut` dimension"),
        ({"name": "l.{layer}.x", "shape": ["hidden"], "cut": 1}, "has 1 dimensions, so dimension 1 cannot be cut"),
        ({"name": "l.{layer}.x", "cut": 1, "vocabulary": True}, "a vocabulary is cut along dimension 0, not 1"),
        ({"name": "l.{layer}.x", "shape": ["hiden"]}, "'hiden' uses 'hiden', which is not in [sizes]"),
        ({"name": "l.{layer}.x", "shape": ["2 +"]}, "expression '2 +' is incomplete"),
        ({"name": "l.{layer}.x", "cut": 0, "units": "kv"}, "'kv' uses 'kv'"),
        ({"name": "l.{layer}.{part}"}, "no values are listed for {part}"),
        ({"name": "l.{layr}.x", "stage": "first"}, "no values are listed for {layr}"),
        ({"name": "l.{layer}.x{layer}"}, "'l.{layer}.x{layer}' has a placeholder twice"),
        ({"name": ["l.{layer}.q"]}, "'l.{layer}.q' is defined twice"),
    ],
)
def test_tensors_that_cannot_be_meant_are_refused(tensor: dict[str, Any], why: str) -> None:
    """Each contradiction is refused with the table's name, the tensor's pattern and what is wrong."""
    with pytest.raises(InvalidRequest) as refused:
        _table(_with(tensors=[Q, K, V, E, tensor]))
    assert refused.value.detail.startswith("rules table 't0': ")
    assert why in refused.value.detail
    assert refused.value.hint


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"of": ["l.{layer}.q", "l.{layer}.k", "v"]}, "made of 'v', which has the placeholders none instead of {layer}"),
        ({"of": ["l.{layer}.q", "l.{layer}.k", "l.{layer}.x"]}, "'l.{layer}.x', which has no [[tensors]] entry"),
        ({"of": ["l.{layer}.q", "l.{layer}.k", "l.{layer}.q"]}, "lists a tensor twice"),
        ({"of": ["l.{layer}.q", "l.{layer}.k"]}, "must list query, key and value"),
        ({"dimension": 2}, "joins dimension 2 of 'l.{layer}.q', which has fewer"),
        ({"name": "l.{layer}.q"}, "'l.{layer}.q' is defined twice"),
        ({"heads": ["heads", "kv"]}, "'kv' uses 'kv'"),
        ({"name": "l.{layer}.{part}"}, "which has the placeholders {layer} instead of {layer}, {part}"),
        ({"kind": "experts", "name": "l.{layer}.{expert}"}, "holds all experts, so its name has no {expert}"),
        ({"kind": "experts"}, "which has the placeholders {layer} instead of {expert}, {layer}"),
    ],
)
def test_fusions_that_cannot_be_meant_are_refused(change: dict[str, Any], why: str) -> None:
    """A fused tensor must be made of tensors that the table tells of, with the same places, along a dimension they have."""
    with pytest.raises(InvalidRequest) as refused:
        _table(_with(fusions=[QKV | change]))
    assert why in refused.value.detail


def test_queries_need_their_heads_said() -> None:
    """Without the numbers of heads nobody could take a fused tensor apart."""
    with pytest.raises(InvalidRequest, match="give its heads"):
        _table(_with(fusions=[{key: value for key, value in QKV.items() if key != "heads"}]))
    pair = {"kind": "gate_up", "name": "l.{layer}.kv", "of": ["l.{layer}.k", "l.{layer}.v"]}
    with pytest.raises(InvalidRequest, match="but no `heads`"):
        _table(_with(fusions=[{**pair, "found": "groups"}]))


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        (
            {"ties": [{"alias": "{root}a", "target": "b", "when": "tie"}]},
            "only the target may have a placeholder, and only {root}",
        ),
        (
            {"ties": [{"alias": "a", "target": "b.{layer}", "when": "tie"}]},
            "only the target may have a placeholder, and only {root}",
        ),
        (
            {"synonyms": [{"names": ["l.{layer}.q", "q"]}]},
            "'l.{layer}.q' and 'q' cannot be synonyms: their placeholders differ",
        ),
        ({"synonyms": [{"names": ["l.{layer}.q", "l.{layer}.x"]}]}, "'l.{layer}.x' is a synonym, but has no [[tensors]]"),
        ({"sizes": SIZES | {"hidden": "a b"}}, "unexpected 'b'"),
        ({"marks": ["{part}"]}, "no values are listed for {part}"),
    ],
)
def test_other_entries_that_cannot_be_meant_are_refused(tables: dict[str, Any], why: str) -> None:
    """Ties, synonyms, sizes and marks are checked as tensors are."""
    with pytest.raises(InvalidRequest) as refused:
        _table(_with(**tables))
    assert why in refused.value.detail


def test_what_is_nearer_counts() -> None:
    """An extending table's sizes, tensors, fusions, ties and root replace those of the same name; the rest stays."""
    base = _with(
        root=["model.", ""],
        tensors=[Q, K, V, {"name": "{root}norm", "stage": "last"}],
        ties=[{"alias": "head", "target": "{root}norm", "when": "tie"}],
    )
    own = {
        "root": ["my."],
        "sizes": {"rows": "128"},
        "tensors": [{"name": "l.{layer}.q", "shape": ["hidden"]}],
        "fusions": [QKV | {"stored": True}],
        "ties": [{"alias": "head", "target": "{root}norm", "when": "tie", "default": True}],
    }
    table = _table(own, base)
    assert [pattern.text for pattern in table.tensors] == ["l.{layer}.q", "l.{layer}.k", "l.{layer}.v", "my.norm"]
    assert table.tensors[compile_pattern("l.{layer}.q")].cut is None
    assert table.sizes["rows"] == (128,)
    assert [row.stored for row in table.fusions.values()] == [True]
    assert [(tie.targets, tie.default) for tie in table.ties] == [(("my.norm",), True)]


def test_scales_follow_weights_of_two_dimensions() -> None:
    """Beside a weight stands its scale, and beside a fused weight the fused scales; vocabularies and vectors have none."""
    parts = [f"l.{{layer}}.{part}.weight" for part in "gu"]
    own = {
        "sizes": {"n": 256},
        "scales": {"suffix": "_scale", "block": 128},
        "tensors": [
            {"name": parts, "shape": ["n", "n"], "cut": 0},
            {"name": "l.{layer}.norm.weight", "shape": ["n"]},
            {"name": "embed.weight", "shape": ["n", "n"], "cut": 0, "vocabulary": True, "stage": "first"},
        ],
        "fusions": [
            {"kind": "gate_up", "name": "l.{layer}.gu", "of": parts},
            {"kind": "gate_up", "name": "l.{layer}.gn", "of": [parts[0], "l.{layer}.norm.weight"]},
        ],
    }
    table = _table(own)
    scaled = {pattern.text: row.block for pattern, row in table.tensors.items() if row.block > 1}
    assert scaled == {f"{part}_scale": 128 for part in parts}
    assert {pattern.text for pattern in table.fusions} == {"l.{layer}.gu", "l.{layer}.gn", "l.{layer}.gu_scale"}
    assert [part.text for part in table.fusions[compile_pattern("l.{layer}.gu_scale")].of] == list(scaled)

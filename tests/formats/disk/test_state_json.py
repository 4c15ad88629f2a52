"""values: state.json from all ranks, and back to any rank of any world."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.disk import state_json
from holdfast_formats.disk.state_json import Values
from holdfast_formats.errors import CorruptManifest, InvalidRequest

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
RANKS = st.dictionaries(st.integers(0, 12), st.dictionaries(st.sampled_from("abc"), DOCUMENTS), min_size=1, max_size=4)


def text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def of(ranks: dict[int, dict[str, Any]]) -> dict[int, Values]:
    """What ranks put into their tables: one group, JSON as text."""
    return {rank: {"extra": {key: text(value) for key, value in held.items()}} for rank, held in ranks.items()}


@given(RANKS)
def test_every_rank_gets_back_what_it_wrote(ranks: dict[int, dict[str, Any]]) -> None:
    """In the same world each rank's own values come back exactly, and only what it did not write is remapped."""
    encoded = state_json.merge(500, {}, ["extra"], of(ranks))
    keys = {key for held in ranks.values() for key in held}
    for rank, held in ranks.items():
        restored = state_json.for_rank(encoded, rank)
        assert set(restored.values["extra"]) == keys
        assert {key: restored.values["extra"][key] for key in held} == {key: text(value) for key, value in held.items()}
        assert restored.remapped == tuple(sorted(f"extra/{key}" for key in keys - set(held)))


@given(RANKS, st.data())
def test_the_order_of_ranks_and_keys_does_not_show(ranks: dict[int, dict[str, Any]], data: st.DataObject) -> None:
    """Whoever reports first, the same bytes are written."""
    shuffled = {
        rank: dict(data.draw(st.permutations(list(ranks[rank].items())))) for rank in data.draw(st.permutations(list(ranks)))
    }
    assert state_json.merge(1, {"b": 1.0, "a": 2.0}, ["extra"], of(ranks)) == state_json.merge(
        1, {"a": 2.0, "b": 1.0}, ["extra"], of(shuffled)
    )


def test_what_all_agree_on_is_stored_once() -> None:
    """The document states step, metrics and groups; agreement stands under `all`, the rest under `ranks` by number."""
    ranks = {0: {"lr": 0.5, "loader": [0], "main": True}, 1: {"lr": 0.5, "loader": [1]}}
    assert json.loads(state_json.merge(500, {"loss": 2.5}, ["model", "extra"], of(ranks))) == {
        "format": 1,
        "step": 500,
        "metrics": {"loss": 2.5},
        "groups": {
            "model": {},
            "extra": {"lr": {"all": 0.5}, "loader": {"ranks": {"0": [0], "1": [1]}}, "main": {"ranks": {"0": True}}},
        },
    }


@pytest.mark.parametrize(("rank", "writer"), [(0, 0), (2, 2), (10, 10), (1, 2), (3, 0), (4, 2), (5, 10), (11, 10), (12, 0)])
def test_a_rank_without_a_value_gets_another_ones(rank: int, writer: int) -> None:
    """A writer gets its own; others the writer at `rank mod writers`, counted by number and not by text; it is reported."""
    encoded = state_json.merge(1, {}, ["extra"], of({w: {"loader": w} for w in (10, 2, 0)}))
    restored = state_json.for_rank(encoded, rank)
    assert restored.values == {"extra": {"loader": str(writer)}}
    assert restored.remapped == (() if rank == writer else ("extra/loader",))


def test_any_text_comes_back() -> None:
    """Other scripts, and a file name that is not valid Unicode, survive; the bytes stay ASCII."""
    held = {"name": "\ud800", "text": "检查点"}
    encoded = state_json.merge(1, {}, ["extra"], of({0: held, 1: held}))
    assert encoded.isascii()
    restored = state_json.for_rank(encoded, 7)
    assert {key: json.loads(value) for key, value in restored.values["extra"].items()} == held
    assert not restored.remapped


def test_numbers_that_json_lacks_are_refused() -> None:
    """state.json is JSON for every reader: no infinity, not even as a number that is too large; metrics have words."""
    for number in ("1e999", "-1e999"):
        with pytest.raises(InvalidRequest, match="JSON cannot represent"):
            state_json.merge(1, {}, ["extra"], {0: {"extra": {"loader": number}}})
    stated = json.loads(state_json.merge(1, {"loss": float("nan"), "lr": 1.0}, [], {}))
    assert (stated["metrics"], stated["nonfinite_metrics"]) == ({"lr": 1.0}, {"loss": "NaN"})


@pytest.mark.parametrize("broken", ["", "nope", "{", "1 2", "NaN", "[-Infinity]", "[" * 200_000])
def test_a_value_that_is_not_json_is_refused_by_name(broken: str) -> None:
    """A rank's text that is no document stops the save with the value's name."""
    with pytest.raises(InvalidRequest, match="'loader' of group 'extra'"):
        state_json.merge(1, {}, ["extra"], {0: {"extra": {"loader": broken}}})


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        7,
        {"format": 2, "groups": {}},
        {"format": 1},
        {"format": 1, "groups": []},
        {"format": 1, "groups": {"extra": 7}},
        {"format": 1, "groups": {"extra": {"x": {}}}},
        {"format": 1, "groups": {"extra": {"x": "all"}}},
        {"format": 1, "groups": {"extra": {"x": {"ranks": {}}}}},
        {"format": 1, "groups": {"extra": {"x": {"ranks": [5]}}}},
        {"format": 1, "groups": {"extra": {"x": {"ranks": {"one": 1}}}}},
    ],
)
def test_a_document_that_is_not_ours_is_refused(document: Any) -> None:
    """Every way in which state.json can be something else is one named error."""
    with pytest.raises(CorruptManifest, match=r"cannot read state\.json"):
        state_json.for_rank(json.dumps(document).encode(), 0)


@given(st.binary(max_size=40))
def test_random_bytes_give_named_errors(noise: bytes) -> None:
    """Noise, alone or inside the document, is refused by name."""
    for encoded in (noise, b'{"format":1,"groups":' + noise + b"}", b'{"format":NaN}', b"[" * 200_000):
        try:
            state_json.for_rank(encoded, 0)
        except CorruptManifest:
            continue
        assert json.loads(encoded)["format"] == 1


def test_values_by_heirs() -> None:
    """Whose value a rank gets can be said for each; what ranks agreed on is everybody's, and what differed is named."""
    encoded = state_json.merge(1, {}, ["extra"], {r: {"extra": {"a": str(r), "b": str(-r), "c": "7"}} for r in range(3)})
    found = state_json.for_rank(
        encoded, 0, lambda group, key: {"a": 2, "b": 5}[key] if group == "extra" and key != "c" else 9
    )
    assert found.values == {"extra": {"a": "2", "b": "-2", "c": "7"}}
    assert (found.remapped, found.ranked) == (("extra/b",), ("extra/a", "extra/b"))


def test_values_of_all_ranks() -> None:
    """What differed can be had from every rank that wrote it, in rank order; what all agreed on is not among it."""
    ranks = {r: {"optim": {"a": f'"{r}"', "c": "7"} if r != 3 else {"c": "7"}} for r in range(12)}
    found = state_json.by_rank(state_json.merge(1, {}, ["optim"], ranks), "optim")
    assert list(found) == ["a"]
    assert list(found["a"].items()) == [(r, f'"{r}"') for r in range(12) if r != 3]
    assert state_json.by_rank(state_json.merge(1, {}, ["optim"], ranks), "nope") == {}
    with pytest.raises(CorruptManifest):
        state_json.by_rank(b"{}", "optim")


def test_what_a_checkpoint_was_made_of() -> None:
    """It stands beside the values, and changes none; a saved checkpoint has none; what is no object is refused."""
    encoded = state_json.merge(1, {"loss": 0.5}, ["extra"], {0: {"extra": {"a": "7"}}})
    told = state_json.with_source(encoded, {"kind": "hf", "files": [{"file": "a\ud800"}]})
    assert state_json.source_of(encoded) is None
    assert state_json.source_of(told) == {"kind": "hf", "files": [{"file": "a\ud800"}]}
    assert state_json.for_rank(told, 0) == state_json.for_rank(encoded, 0)
    for wrong in (b'{"format": 1, "groups": {}, "source": 3}', b"{}", b"["):
        with pytest.raises(CorruptManifest):
            state_json.source_of(wrong)

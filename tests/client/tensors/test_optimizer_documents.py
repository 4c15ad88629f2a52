"""Optimizers' documents under other names, and several as one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.tensors import json_values
from holdfast.tensors.optimizer_documents import merged, renamed
from holdfast_formats.errors import StateMismatch


def document(groups: dict[str, Any], state: dict[str, Any], masters: dict[str, list[str]]) -> str:
    return json_values.dumps({"groups": groups, "state": state, "masters": masters, "kinds": {}}, "optim")


def test_one_name_becomes_several_and_comes_back() -> None:
    """A fused parameter's entries become those of its parts; going back, the first part's are taken. Order is kept."""
    text = document(
        {"qkv": {"params": ["qkv", "b"], "lr": 0.5}, "a": {"params": ["a"], "lr": 0.1}, "#2": {"params": []}},
        {"qkv": {"seen": 3}, "a": {"seen": 4}},
        {"main_param": ["qkv", "a"]},
    )
    there = renamed(text, {"qkv": ["q", "k"]})
    found = json_values.loads(there, "optim")
    assert found["groups"] == {
        "q": {"params": ["q", "k", "b"], "lr": 0.5},
        "a": {"params": ["a"], "lr": 0.1},
        "#2": {"params": []},
    }
    assert list(found["groups"]) == ["q", "a", "#2"]
    assert found["state"] == {"q": {"seen": 3}, "k": {"seen": 3}, "a": {"seen": 4}}
    assert found["masters"] == {"main_param": ["q", "k", "a"]}
    assert json_values.loads(renamed(there, {"q": ["qkv"], "k": ["qkv"]}), "optim") == json_values.loads(text, "optim")


def test_a_parameter_of_nobody_is_left_out() -> None:
    """What another rank holds has no name here: its group goes when nothing of it is left."""
    text = document({"a": {"params": ["a"]}, "b": {"params": ["b"]}}, {"a": {"seen": 1}}, {"m": ["a", "b"]})
    found = json.loads(renamed(text, {"a": []}))
    assert (set(found["groups"]), found["state"], found["masters"]) == ({"b"}, {}, {"m": ["b"]})


def test_documents_of_several_ranks() -> None:
    """Parameters of all are known; groups with equal hyper-parameters are one; of a common name the first's are taken."""
    first = document(
        {"a": {"params": ["a"], "lr": 0.1}, "n": {"params": ["n"], "lr": 0.2}}, {"a": {"seen": 1}}, {"m": ["a"]}
    )
    second = document({"b": {"params": ["b", "a"], "lr": 0.1}, "c": {"params": ["c"], "lr": 0.3}}, {"a": {"seen": 2}}, {})
    found = json_values.loads(merged([first, second]), "optim")
    assert found["groups"] == {
        "a": {"params": ["a", "b"], "lr": 0.1},
        "n": {"params": ["n"], "lr": 0.2},
        "c": {"params": ["c"], "lr": 0.3},
    }
    assert found["state"] == {"a": {"seen": 1}}
    assert found["masters"] == {"m": ["a"]}
    assert merged([first]) == first
    assert json_values.loads(merged([first, first]), "optim") == json_values.loads(first, "optim")


def test_wrapper_tensors_of_several_ranks() -> None:
    """Each rank says what its own are; under other names they would be cut or joined, which is refused."""
    texts = [
        json_values.dumps({"groups": {}, "state": {}, "masters": {}, "kinds": {}, "wrapped": said}, "optim")
        for said in ({"b": {"m": {"class": "x:Y"}}}, {"a": {"m": {"class": "x:Z"}}, "b": {"m": {"class": "x:other"}}}, {})
    ]
    found = json_values.loads(merged(texts), "optim")["wrapped"]
    assert found == {"b": {"m": {"class": "x:Y"}}, "a": {"m": {"class": "x:Z"}}}
    assert renamed(texts[2], {"a": ["b"]}) == texts[2]
    with pytest.raises(StateMismatch, match="the optimizer's state of b is in blocks of codes"):
        renamed(texts[0], {"b": ["c"]})


def test_idle_parameters_are_left_out_under_other_names() -> None:
    """The rest stays, in its order; the ranks' documents as one have them all, also if the first has none."""
    plain = {"groups": {"b": {"params": ["b", "a"]}}, "state": {}, "masters": {}, "kinds": {}}
    idle = json_values.dumps({**plain, "idle": ["a"]}, "optim")
    found = json_values.loads(renamed(idle, {"b": ["c"]}), "optim")
    assert found == {**plain, "groups": {"c": {"params": ["c", "a"]}}}
    assert list(found) == list(plain)
    without = json_values.dumps(plain, "optim")
    for texts in ([idle, without], [without, idle]):
        assert json_values.loads(merged(texts), "optim") == {**plain, "idle": ["a"]}


def test_what_is_no_such_document_stays() -> None:
    """Text of another kind is handed on as it is, also if it names a part that it lacks."""
    odd = document({"$a": {"params": ["$a"]}}, {}, {})
    lacking = document({}, {}, {}).replace('"kinds"]', '"kinds","idle"]')
    assert '"idle"' in lacking
    for text in ("[1]", "not json", '{"groups": {}}', odd, lacking):
        assert renamed(text, {"a": ["b"]}) == text
        assert merged([text, document({}, {}, {})]) == text


def test_rates_that_groups_began_with_stay_with_their_groups() -> None:
    """Under new names, and where only one rank's groups have them."""

    def of(name: str, began: dict[str, float]) -> str:
        made = {"groups": {name: {"params": [name], "lr": 0.5}}, "state": {}, "masters": {}, "kinds": {}}
        return json_values.dumps({**made, **({"began": began} if began else {})}, "optim")

    first, second = of("a", {}), of("b", {"b": 0.1})
    for texts in ([first, second], [second, first]):
        assert json_values.loads(merged(texts), "optim")["began"] == {"b": 0.1}
    assert json_values.loads(renamed(second, {"b": ["c"]}), "optim")["began"] == {"c": 0.1}

"""Tied tensors get all their names back, and a sentence says so."""

from __future__ import annotations

from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.exports.tied_tensors import said, tied

EMBEDDING = MappedTensor(TensorSpec("model", "embed.weight", "F32", (2, 3)), (), padded=True)
TIES = {"lm_head.weight": "embed.weight", "other.weight": "nobody.weight"}


def test_every_name_of_a_tensor_that_is_there() -> None:
    """A tie to a tensor that is not exported makes nothing."""
    found = tied({"embed.weight": EMBEDDING}, TIES)
    assert found.keys() == {"embed.weight", "lm_head.weight"}
    assert found["lm_head.weight"].spec == TensorSpec("model", "lm_head.weight", "F32", (2, 3))
    assert found["embed.weight"] is EMBEDDING


def test_a_sentence_for_people() -> None:
    """Sorted by name; nothing is said where nothing is tied."""
    assert said({"b": "a", "a2": "a"}) == ["tied weights are stored under both names: a2 = a, b = a"]
    assert said({}) == []

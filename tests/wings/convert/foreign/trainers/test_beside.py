"""The files beside the weights: kept as documents, counted, and refused where they hold objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.listing import TensorKey
from holdfast_service.wings.convert.foreign.dcp.gathering import GatheredListing
from holdfast_service.wings.convert.foreign.trainers import beside
from tests.wings.convert.foreign.directories import OnDisk


def test_a_value_with_tensors_is_a_document(tmp_path: Path) -> None:
    torch.save({"seen": 3, "sums": torch.ones(2)}, tmp_path / "a.pkl")
    gathered = GatheredListing(OnDisk(tmp_path))
    beside.keep(gathered, "a.pkl", "registered")
    assert gathered.documents == {"extra": {"registered": {"seen": 3, "sums": {"$tensor": "ranks/00000/registered/sums"}}}}
    assert set(gathered.tensors) == {TensorKey("extra", "ranks/00000/registered/sums")}
    torch.save({"kind": torch.strided}, tmp_path / "b.pkl")
    beside.keep(gathered, "b.pkl", "other")
    assert "other" not in gathered.documents["extra"]
    assert [(part.name, part.group, str(part.error)[:5]) for part in gathered.refused] == [("b.pkl", "", "b.pkl")]


def test_files_are_numbered_without_gaps() -> None:
    assert beside.numbers(["optimizer_1.bin", "optimizer.bin"]) == {0: "optimizer.bin", 1: "optimizer_1.bin"}
    assert beside.numbers([]) == {}
    for names in (["a_1.bin"], ["a.bin", "a_2.bin"], ["a.bin", "a_0.bin"]):
        with pytest.raises(StateMismatch, match="are missing") as refused:
            beside.numbers(names)
        assert refused.value.hint


def test_a_dict_has_names() -> None:
    assert beside.mapping({"a": 1}, "f") == {"a": 1}
    for value in ([], {1: 2}):
        with pytest.raises(StateMismatch, match="f does not hold a dict"):
            beside.mapping(value, "f")

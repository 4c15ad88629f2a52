"""Sets of safetensors files: names, metadata, order, index, known tensors among streamed ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from holdfast_formats.errors import StateMismatch
from holdfast_formats.mapping.box_moves import same
from holdfast_formats.mapping.listing import TensorKey
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.exports.plan import ExportPlan
from holdfast_service.wings.convert.exports.safetensors_files import KnownTensor, shard_set
from tests.wings.convert.exports.sources import made, write

ARRAYS = {f"layers.{n}.w": np.full((5, n + 1), n, np.float32) for n in range(12)}


@pytest.mark.parametrize(
    ("numbered", "limit", "names"),
    [
        (False, 10**9, ["x.safetensors"]),
        (True, 10**9, ["x-00001-of-00001.safetensors"]),
        (False, 800, ["x-00001-of-00003.safetensors", "x-00002-of-00003.safetensors", "x-00003-of-00003.safetensors"]),
    ],
)
def test_tensors_are_in_the_files_that_the_index_says(tmp_path: Path, numbered: bool, limit: int, names: list[str]) -> None:
    """One file or several, each with the metadata that was asked for; a known tensor beside those that are streamed."""
    source = made(tmp_path / "step", {"model": ARRAYS}).source
    mapped = [same(tensor, TensorKey("y", f"renamed.{name}")) for name, tensor in source.group("model").items()]
    known = KnownTensor(TensorSpec("y", "known", "F32", (1,)), np.array([7], "<f4").tobytes())
    made_set = shard_set("x", [*mapped, known], "np", numbered, limit)
    out = write(source, ExportPlan((*made_set.files, made_set.index_file("i.json", {"more": True}))), tmp_path / "out")
    assert sorted(path.name for path in out.glob("*.safetensors")) == names
    index = json.loads((out / "i.json").read_text())
    assert index.keys() == {"metadata", "weight_map", "more"}
    expected = {f"renamed.{name}": array for name, array in ARRAYS.items()} | {"known": np.array([7], np.float32)}
    assert index["metadata"]["total_size"] == made_set.total_bytes == sum(array.nbytes for array in expected.values())
    for name in names:
        with safe_open(out / name, "np") as file:
            assert file.metadata() == {"format": "np"}
        for tensor, array in load_file(out / name).items():
            assert index["weight_map"].pop(tensor) == name and np.array_equal(array, expected.pop(tensor))
    assert not expected and not index["weight_map"]


def test_a_name_is_there_once(tmp_path: Path) -> None:
    """Two tensors that a mapping gave one name are refused."""
    tensors = made(tmp_path / "step", {"model": ARRAYS}).source.group("model")
    mapped = [same(tensors[name], TensorKey("model", "w")) for name in ("layers.1.w", "layers.2.w")]
    with pytest.raises(StateMismatch, match="'w'"):
        shard_set("model", mapped, "pt")

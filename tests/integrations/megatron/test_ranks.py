"""Files by rank and `torch_dist` of one training are imported as the same weights and optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.dcp import kinds
from holdfast_service.wings.convert.foreign.megatron_ranks import kinds as megatron_ranks
from tests.torchruns import launch
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, read


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, ["--tp", "2"]),
        (2, ["--pp", "2"]),
        (2, ["--tp", "2", "--bias", "--bf16"]),
        (2, ["--pp", "2", "--bf16"]),
        (2, ["--bf16", "--distributed"]),
        (2, ["--tp", "2", "--bias", "--bf16", "--distributed"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_same_training(tmp_path: Path, ranks: int, how: list[str]) -> None:
    """Bit by bit: matrices that are split by rows, by columns and as pairs, layers of both stages, masters and moments."""
    sharding = ["--sharding", "fully_reshardable", "--ranks", str(tmp_path / "ranks")]
    launch(ranks, "tests.integrations.megatron.torch_dist", "--work", str(tmp_path / "dist"), *sharding, *how)
    found = megatron_ranks.KIND.read(DirectoryFiles(tmp_path / "ranks"), ReadOptions())
    wanted = kinds.read_megatron(DirectoryFiles(tmp_path / "dist"), ReadOptions())
    names = {key for key in wanted.tensors if key.group != "extra"}
    assert names == {key for key in found.tensors if key.group != "extra"}
    assert {key.group for key in names} == {"model", "optim", *(["master"] if "--bf16" in how else [])}
    for key in names:
        one, other = found.tensors[key], wanted.tensors[key]
        assert (one.spec.dtype, one.spec.shape) == (other.spec.dtype, other.spec.shape), key
        mine = read(tmp_path / "ranks", found, *key)
        assert mine.tobytes() == read(tmp_path / "dist", wanted, *key).tobytes(), key

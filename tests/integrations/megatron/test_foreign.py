"""What Megatron-core saves itself is imported: stacked layers and experts, tensor parallelism, masters and moments."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import pytest

from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import ForeignListing, TensorKey
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.dcp import kinds
from tests.torchruns import torchrun
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, read

WORKER = "tests.integrations.megatron.torch_dist"


def _saved(path: Path, ranks: int, *words: str) -> ForeignListing:
    torchrun(ranks, WORKER, "--work", str(path), "--bf16", *words)
    return kinds.read_megatron(DirectoryFiles(path), ReadOptions())


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ("--sharding", "fully_reshardable", "--distributed", "--by-number")),
        (1, ("--sharding", "none", "--experts", "4")),
        (2, ("--sharding", "fully_reshardable", "--distributed", "--tp", "2")),
    ],
    ids=["layers by number", "stacked layers and experts", "tp=2"],
)
def test_weights_masters_and_moments(ranks: int, words: tuple[str, ...], tmp_path: Path) -> None:
    """Every weight is its master, rounded, which only the right place gives; every one has moments and the step."""
    listing = _saved(tmp_path, ranks, *words)
    weights = {key.name for key in listing.tensors if key.group == "model"}
    assert weights == {key.name for key in listing.tensors if key.group == "master"}
    assert any(name.startswith("decoder.layers.1.") for name in weights)
    for name in weights:
        master = read(tmp_path, listing, "master", name)
        assert master.astype(ml_dtypes.bfloat16).tobytes() == read(tmp_path, listing, "model", name).tobytes(), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert listing.tensors[TensorKey("optim", f"{name}/{kind}")].spec.shape == master.shape
        step = listing.tensors[TensorKey("optim", f"{name}/step")]
        assert reading.fetched(DirectoryFiles(tmp_path), step) == 3
    assert listing.step == 3


def test_buffers_of_the_distributed_optimizer(tmp_path: Path) -> None:
    """Megatron's default cuts them as its buffers are; they are kept as they are, and said."""
    listing = _saved(tmp_path, 1, "--sharding", "dp_reshardable", "--distributed")
    assert {key.group for key in listing.tensors} == {"model", "extra"}
    assert any("do not name their weights" in note for note in listing.notes)

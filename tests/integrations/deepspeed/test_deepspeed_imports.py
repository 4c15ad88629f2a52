"""What ranks of plain DeepSpeed save is imported as its own tools read it: `zero_to_fp32`, and `ds_to_universal`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast_formats.mapping.listing import ForeignListing
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.deepspeed.kinds import KIND
from tests.torchruns import torchrun
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles
from tests.wings.convert.foreign.dcp.directories import read as read_tensor

pytestmark = pytest.mark.filterwarnings("ignore")
TAG = "global_step3"


def values(place: Path, listing: ForeignListing) -> dict[tuple[str, str], bytes]:
    return {(group, name): read_tensor(place, listing, group, name).tobytes() for group, name in listing.tensors}


def read(place: Path) -> ForeignListing:
    return KIND.read(DirectoryFiles(place), ReadOptions())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("stage", "kind"), [(1, "bf16"), (2, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp32")])
def test_as_deepspeed_reads_it(tmp_path: Path, ranks: int, stage: int, kind: str) -> None:
    """The masters of its consolidation, the engine's own weights and moments, and all of the universal checkpoint."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    saved = tmp_path / "saved"
    torchrun(ranks, "tests.integrations.deepspeed.saving", str(saved), str(stage), kind)
    listing = read(saved)
    found = values(saved, listing)
    consolidated: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(str(saved))
    for name, tensor in consolidated.items():
        own = found.get(("master", name), found.get(("model", name)))
        if ("master", name) in found or kind == "fp32":
            assert own == tensor.detach().contiguous().numpy().tobytes(), name
    for name, tensor in torch.load(tmp_path / "engine.pt").items():
        stem, _, part = name.rpartition("/")
        key = ("model", name) if not stem else ("optim", name)
        key = key if part != "master" else ("master" if kind != "fp32" else "model", stem)
        assert found[key] == tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), name
    universal = to_universal(saved)
    assert values(universal, read(universal)) == found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("stage", "kind"), [(1, "bf16"), (2, "fp32")])
def test_tensor_parallelism(tmp_path: Path, ranks: int, stage: int, kind: str) -> None:
    """The parts of two ranks are joined as DeepSpeed joins them: by rows, columns and halves, without padded words."""
    saved = tmp_path / "saved"
    torchrun(ranks, "tests.integrations.deepspeed.parallel", str(saved), str(stage), kind)
    listing = read(saved)
    universal = to_universal(saved)
    assert values(saved, listing) == values(universal, read(universal))
    assert ("optim", "gated.weight/exp_avg_sq") in listing.tensors


def to_universal(saved: Path) -> Path:
    """What `ds_to_universal` makes of a checkpoint."""
    universal = saved.parent / "universal" / f"{TAG}_universal"
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--num_extract_workers", "1"]
    places = ["--num_merge_workers", "1", "--input_folder", str(saved / TAG), "--output_folder", str(universal)]
    universal.parent.mkdir()
    shutil.copy(saved / "latest", universal.parent / "latest")
    subprocess.run([*tool, *places], check=True, capture_output=True)
    (universal.parent / "latest").unlink(missing_ok=True)
    return universal.parent

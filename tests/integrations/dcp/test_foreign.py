"""What real ranks save by `dcp.save` is imported exactly."""

from __future__ import annotations

from pathlib import Path

import torch

from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.dcp import kinds
from tests.torchruns import launch
from tests.wings.convert.foreign.dcp.directories import DirectoryFiles, assert_same


def test_fsdp(tmp_path: Path) -> None:
    """Two processes with FSDP2 over gloo, each of which has shards of weights and moments."""
    launch(2, "tests.integrations.dcp.fsdp_worker", str(tmp_path))
    saved = tmp_path / "saved"
    listing = kinds.read_dcp(DirectoryFiles(saved), ReadOptions())
    wanted = torch.load(tmp_path / "whole.pt")
    assert len([use for use in listing.files if use.use == "tensors"]) == 2
    assert_same(saved, listing, "model", wanted["model"])
    state = wanted["optim"]["state"]
    assert_same(saved, listing, "optim", {f"{n}/{k}": v for n, held in state.items() for k, v in held.items()})

"""Saved by 4 ranks in a 2x2 mesh, restored by 1 to 4 ranks in others, bit for bit; saved again, the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast_formats import naming
from tests.daemons import RunningDaemon, running
from tests.torchruns import launch, torchrun

WORKER = "tests.distributed.reshard_worker"
RESTORES = {1: "plain", 2: "fsdp,tp,ddp", 3: "fsdp", 4: "fsdp,2d,hsdp"}
BY_TORCHRUN = 2  # ranks: starting them by torchrun takes seconds, and one launch shows that it works


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """A daemon with a checkpoint saved by 4 ranks (FSDP2 x TP), and torch's own digests of what was saved."""
    directory = tmp_path_factory.mktemp("reshard")
    with running(directory / "root") as daemon:
        launch(4, WORKER, "save", str(daemon.socket), str(directory / "saved"), "2d")
        yield daemon, json.loads((directory / "saved.2d.json").read_text()), directory


@pytest.mark.parametrize("ranks", RESTORES)
def test_restored_on_any_number_of_ranks(saved: tuple[RunningDaemon, dict, Path], ranks: int) -> None:
    """Weights, optimizer, EMA, learning rate and schedule are bit-equal in every mesh; saving again gives the same files."""
    daemon, expected, directory = saved
    start = torchrun if ranks == BY_TORCHRUN else launch
    start(ranks, WORKER, "restore", str(daemon.socket), str(directory / f"restored-{ranks}"), RESTORES[ranks])
    for mesh in RESTORES[ranks].split(","):
        assert json.loads((directory / f"restored-{ranks}.{mesh}.json").read_text()) == expected
        original = daemon.root / naming.checkpoint_path("r", 3)
        again = daemon.root / naming.checkpoint_path(f"again-{ranks}-{mesh}", 3)
        for name in ("model.safetensors", "optim.safetensors", "ema.safetensors"):
            assert (again / name).read_bytes() == (original / name).read_bytes(), f"{mesh}: {name}"

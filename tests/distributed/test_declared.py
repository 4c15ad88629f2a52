"""Local tensors that say nothing of themselves, saved by 4 ranks with layout=, restored by 1, 2 and 4 in others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer
from holdfast_formats import naming
from tests.client import llama
from tests.daemons import RunningDaemon, running
from tests.torchruns import launch

WORKER = "tests.distributed.declared_worker"
DATA_PARALLEL, STAGES = "tp=2,dp=2,qkv=ranks,gate_up=ranks", "tp=2,pp=2,qkv=ranks,gate_up=ranks"
RESTORED = {
    1: ["tp=1", "tp=1,qkv=ranks,gate_up=ranks"],
    2: ["pp=2", "dp=2"],
    4: ["tp=4,qkv=ranks,gate_up=ranks", "tp=2,pp=2"],
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """A daemon with checkpoints saved by 4 ranks: run `r` by two stages, run `data` by two replicas."""
    with running(tmp_path_factory.mktemp("declared") / "root") as daemon:
        launch(4, WORKER, "save", str(daemon.socket), "r", STAGES)
        launch(4, WORKER, "save", str(daemon.socket), "data", DATA_PARALLEL)
        yield daemon


@pytest.mark.parametrize("run", ["r", "data"])
def test_the_checkpoint_is_whole(saved: RunningDaemon, run: str) -> None:
    """What 4 ranks with fused tensors saved is the model by its own names, each once."""
    with holdfast.open(f"{run}@3", root=saved.root) as checkpoint:
        whole = llama.arrays()
        assert set(checkpoint.tensors["model"]) == set(whole)
        for name, array in whole.items():
            np.testing.assert_array_equal(checkpoint.read(name), array)
            moment = checkpoint.read(f"{name}/exp_avg", group="optim")
            np.testing.assert_array_equal(moment, array * np.float32(3))
        assert checkpoint.manifest.mesh["tp"] == 2


@pytest.mark.parametrize("run", ["r", "data"])
def test_restored_plain_on_one(saved: RunningDaemon, run: str) -> None:
    """A model that knows of no layout gets everything, its optimizer included, though stages knew their own alone."""
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in llama.shapes().items()}
    optim = torch.optim.AdamW(parameters.values(), lr=0.5)
    with Checkpointer(run, {"model": parameters, "optim": optim}, at=saved.root) as checkpointer:
        assert checkpointer.restore(strict=False) == 3
        assert checkpointer.last_restore is not None
        assert not checkpointer.last_restore.missing
    for name, array in llama.arrays().items():
        np.testing.assert_array_equal(parameters[name].detach().numpy(), array)
        np.testing.assert_array_equal(optim.state[parameters[name]]["exp_avg"].numpy(), array * np.float32(3))
    assert optim.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("ranks", RESTORED)
def test_restored_in_other_layouts(saved: RunningDaemon, ranks: int) -> None:
    """Each rank gets what numpy cuts for it; saved again from there, the files are the very same."""
    launch(ranks, WORKER, "restore", str(saved.socket), "r", *RESTORED[ranks])
    original = saved.root / naming.checkpoint_path("r", 3)
    for layout in RESTORED[ranks]:
        again = saved.root / naming.checkpoint_path(f"r-again-{layout.replace('=', '').replace(',', '-')}", 3)
        for name in ("model.safetensors", "optim.safetensors"):
            assert (again / name).read_bytes() == (original / name).read_bytes(), f"{layout}: {name}"

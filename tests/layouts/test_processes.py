"""Some of the named pairs with real ranks: torchrun, gloo, up to eight of them, and a daemon between the two layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast_formats import naming
from tests.daemons import RunningDaemon, running

from .matrix import LAYOUTS

SAVED = {"llama": "tp2-pp2-dp2-pp-inner", "moe": "tp2-ep2-stacked-zero2"}  # eight ranks each
RESTORED = {
    "llama": (
        "tp2-fused-padded-zero1-flat",
        "tp4-padded",
        "pp3-explicit",
        "zero2-flat-uneven",
        "fsdp1",
        "grouped",
        "tp2-fsdp2",
    ),
    "moe": ("ep4", "tp2-etp2-ep2", "ep2-zero1-flat", "pp2-vpp2-ep2-zero1", "stacked", "tp2", "ep2-fsdp2"),
}


def torchrun(ranks: int, *arguments: str) -> None:
    """Run the ranks; a failure shows their output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "-m", "tests.layouts.rank_process", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


@pytest.fixture(scope="module", params=SAVED)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A daemon with a checkpoint of a model that eight ranks saved, and the model's name."""
    with running(tmp_path_factory.mktemp("layouts") / "root") as daemon:
        torchrun(8, "save", str(daemon.socket), request.param, SAVED[request.param])
        yield daemon, request.param


def test_restored_by_other_ranks_in_other_layouts(saved: tuple[RunningDaemon, str]) -> None:
    """Every rank gets what the oracle cuts for it, and saves it again as the very same files."""
    daemon, model = saved
    by_world: dict[int, list[str]] = {}
    for layout in RESTORED[model]:
        by_world.setdefault(LAYOUTS[model][layout].ranks, []).append(layout)
    original = daemon.root / naming.checkpoint_path(model, 3)
    for ranks, layouts in by_world.items():
        torchrun(ranks, "restore", str(daemon.socket), model, ",".join(layouts))
        for layout in layouts:
            again = daemon.root / naming.checkpoint_path(f"{model}-{layout}", 3)
            for name in ("model.safetensors", "master.safetensors", "ema.safetensors"):
                assert (again / name).read_bytes() == (original / name).read_bytes(), f"{layout}: {name}"

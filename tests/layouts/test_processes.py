"""Some of the named pairs with real ranks: torchrun, gloo, up to eight of them, and a daemon between the two layouts."""

from __future__ import annotations

import pytest

from holdfast_formats import naming
from tests.daemons import RunningDaemon, running
from tests.torchruns import launch

from .matrix import LAYOUTS

WORKER = "tests.layouts.rank_process"
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


@pytest.fixture(scope="module", params=SAVED)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A daemon with a checkpoint of a model that eight ranks saved, and the model's name."""
    with running(tmp_path_factory.mktemp("layouts") / "root") as daemon:
        launch(8, WORKER, "save", str(daemon.socket), request.param, SAVED[request.param])
        yield daemon, request.param


def test_restored_by_other_ranks_in_other_layouts(saved: tuple[RunningDaemon, str]) -> None:
    """Every rank gets what the oracle cuts for it, and saves it again as the very same files."""
    daemon, model = saved
    by_world: dict[int, list[str]] = {}
    for layout in RESTORED[model]:
        by_world.setdefault(LAYOUTS[model][layout].ranks, []).append(layout)
    original = daemon.root / naming.checkpoint_path(model, 3)
    for ranks, layouts in by_world.items():
        launch(ranks, WORKER, "restore", str(daemon.socket), model, ",".join(layouts))
        for layout in layouts:
            again = daemon.root / naming.checkpoint_path(f"{model}-{layout}", 3)
            for name in ("model.safetensors", "master.safetensors", "ema.safetensors"):
                assert (again / name).read_bytes() == (original / name).read_bytes(), f"{layout}: {name}"

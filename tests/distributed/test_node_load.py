"""Four ranks of one machine restore: every extent is read once there, whatever the mesh. Told by counters, not by time."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast_formats import naming
from holdfast_formats.disk import manifest, verification
from tests.checkpoints import forget
from tests.daemons import RunningDaemon, running, wait_until_read_back
from tests.torchruns import launch

from .test_reshard import WORKER

RANKS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """A daemon with a checkpoint saved by 4 ranks (FSDP2 x TP), and torch's own digests of what was saved."""
    directory = tmp_path_factory.mktemp("node-load")
    with running(directory / "root", listen="127.0.0.1:0", patient=True) as daemon:
        launch(RANKS, WORKER, "save", str(daemon.socket), str(directory / "saved"), "2d")
        wait_until_read_back(daemon, "r", 3)  # which fills the page cache
        yield daemon, json.loads((directory / "saved.2d.json").read_text()), directory


def counted(daemon: RunningDaemon) -> dict[str, int]:
    text = httpx.get(f"{daemon.url}/metrics", trust_env=False).text
    found = {family.name: family for family in text_string_to_metric_families(text)}["holdfast_restore_read_bytes"]
    return {s.labels["by"]: int(s.value) for s in found.samples if s.name == "holdfast_restore_read_bytes_total"}


@pytest.mark.parametrize("mesh", ["ddp", "tp"])
def test_every_extent_is_read_once(saved: tuple[RunningDaemon, dict, Path], mesh: str) -> None:
    """Replicas and strided shards alike: what ranks and daemon read comes to each header and extent once, and is right."""
    daemon, expected, directory = saved
    checkpoint = daemon.root / naming.checkpoint_path("r", 3)
    made = manifest.decode((checkpoint / naming.MANIFEST).read_bytes(), (checkpoint / naming.COMMIT).read_bytes())
    shards = {file.name for file in made.files if file.header_bytes}
    pieces = [piece for name, listed in verification.pieces(made).items() if name in shards for piece in listed]
    before = counted(daemon)
    forget(checkpoint)
    launch(RANKS, WORKER, "restore", str(daemon.socket), str(directory / "restored"), mesh)
    assert json.loads((directory / f"restored.{mesh}.json").read_text()) == expected
    reports = [json.loads((directory / f"restored.{mesh}.rank-{rank}.json").read_text()) for rank in range(RANKS)]
    node, own = (counted(daemon)[by] - before[by] for by in ("node", "rank"))
    assert own == sum(report["own"] for report in reports)
    assert node + own == sum(piece.length for piece in pieces)
    state = sum(piece.length for piece in pieces if piece.group != "extra")
    assert node >= state > 10_000, "all that is not one rank's own is shared"
    assert all(report["node"] >= state for report in reports), reports

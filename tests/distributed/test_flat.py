"""FSDP1: saved from its flat shards by 2 ranks, restored by 1, 2 and 3 in other ways."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.daemons import RunningDaemon, running
from tests.torchruns import launch

WORKER = "tests.distributed.flat_worker"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """A daemon with a checkpoint saved by 2 ranks of FULL_SHARD, and torch's own digests of what was saved."""
    directory = tmp_path_factory.mktemp("flat")
    with running(directory / "root") as daemon:
        launch(2, WORKER, "save", str(daemon.socket), str(directory / "saved"), "FULL_SHARD")
        yield daemon, json.loads((directory / "saved.json").read_text()), directory


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "plain"), (2, "NO_SHARD"), (3, "SHARD_GRAD_OP")])
def test_restored_from_flat_shards(saved: tuple[RunningDaemon, dict, Path], ranks: int, strategy: str) -> None:
    """Weights and optimizer are bit-equal under any strategy, also for a module that had its parameters gathered."""
    daemon, expected, directory = saved
    output = directory / f"restored-{ranks}-{strategy}"
    launch(ranks, WORKER, "restore", str(daemon.socket), str(output), strategy)
    found = json.loads(output.with_suffix(".json").read_text())
    assert set(found) == set(expected)
    assert {name: value for name, value in found.items() if value != expected[name]} == {}


def test_masters_of_flat_shards(saved: tuple[RunningDaemon, dict, Path]) -> None:
    """Each rank keeps those of other parameters: restored with the weights alone, and with everything."""
    launch(2, "tests.distributed.flat_masters_worker", str(saved[0].socket))

"""Ranks of one machine restore together: what several of them want is read and proven once, by their daemon."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Checkpointer, Fragment
from holdfast.api import Api
from holdfast.node import LentMemory
from holdfast_formats import listing, naming
from holdfast_formats import manifest as manifests
from holdfast_formats.errors import CheckpointError, CorruptExtent, InvalidRequest
from holdfast_formats.manifest import Manifest
from holdfast_formats.proof import Piece
from tests.checkpoints import flip
from tests.daemons import RunningDaemon, running, wait_until

ROWS, COLUMNS = 96, 1024
EXTENT = 16 * 2**20
_launches = itertools.count()


def weights() -> dict[str, torch.Tensor]:
    """A tensor of two extents, one of many rows, and a small one."""
    generator = torch.Generator().manual_seed(7)
    return {
        "large": torch.randint(0, 255, (EXTENT + 4096,), dtype=torch.uint8, generator=generator),
        "rows": torch.randn((ROWS, COLUMNS), generator=generator),
        "small": torch.arange(5),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon with a committed step that nobody holds in memory any more."""
    with running(tmp_path_factory.mktemp("node") / "root", listen="127.0.0.1:0") as daemon:
        save(daemon)
        yield daemon


def save(daemon: RunningDaemon) -> None:
    with Checkpointer("r", {"model": weights()}, socket=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")


def manifest(daemon: RunningDaemon) -> Manifest:
    directory = daemon.root / naming.checkpoint_path("r", 1)
    return manifests.decode((directory / naming.MANIFEST).read_bytes(), (directory / naming.COMMIT).read_bytes())


def model_bytes(daemon: RunningDaemon) -> int:
    """Of the files of the group that is restored, headers included."""
    return sum(file.bytes for file in manifest(daemon).files if file.name.startswith("model") and file.header_bytes)


def read_bytes(daemon: RunningDaemon) -> dict[str, float]:
    """What the daemon counts as read for restores: by the node, and by ranks."""
    with Api(daemon.url) as api:
        text = api._http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {s.labels["by"]: s.value for s in families["holdfast_restore_read_bytes"].samples if s.name.endswith("_total")}


def lent_descriptors(daemon: RunningDaemon) -> list[str]:
    """The lent memory that the daemon still has open."""
    found = []
    for entry in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(entry)
            if target.startswith(("/memfd:holdfast-load", "/memfd:holdfast-wish")):
                found.append(target)
    return found


States = Sequence[Mapping[str, object]]


@contextmanager
def ranks(daemon: RunningDaemon, states: States, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Checkpointer]]:
    """Checkpointers of one launch, as the ranks of one machine have them."""
    launch = f"launch-{next(_launches)}"
    monkeypatch.setenv("WORLD_SIZE", str(len(states)))
    made = []
    try:
        for rank, state in enumerate(states):
            monkeypatch.setenv("RANK", str(rank))
            made.append(Checkpointer("r", state, socket=daemon.socket, launch=launch))
        yield made
    finally:
        for checkpointer in made:
            checkpointer.close(wait=False)


def together(act: Callable[[Checkpointer], object], checkpointers: Sequence[Checkpointer]) -> list[object]:
    """Each rank acts at the same time; what each returned or raised."""

    def caught(checkpointer: Checkpointer) -> object:
        try:
            return act(checkpointer)
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(len(checkpointers)) as threads:
        return list(threads.map(caught, checkpointers))


def restore(checkpointer: Checkpointer) -> int:
    return checkpointer.restore(1, groups=["model"])


def empty() -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {name: torch.zeros_like(tensor) for name, tensor in weights().items()}}


def test_replicas_read_nothing_for_themselves(saved: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks that want everything: the daemon reads each extent and header once, the ranks nothing; memory is freed."""
    whole = model_bytes(saved)
    states = [empty() for _ in range(3)]
    before = read_bytes(saved)
    with ranks(saved, states, monkeypatch) as checkpointers:
        assert together(restore, checkpointers) == [1, 1, 1]
        reports = [checkpointer.last_restore for checkpointer in checkpointers]
        assert [(r.node_bytes, r.own_bytes, r.source) for r in reports] == [(whole, 0, "directory")] * 3
        assert all("rank" not in note for report in reports for note in report.notes)
        assert read_bytes(saved) == {"node": before["node"] + whole, "rank": before["rank"]}
        wait_until(lambda: not lent_descriptors(saved))
    expected = weights()
    for state in states:
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in expected.items())
    assert "memfd:holdfast-load" not in Path("/proc/self/maps").read_text()

"""Ranks of one machine that restore together what is in no cache: the disk is read once, whatever each of them wants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, Fragment
from holdfast_files import direct
from holdfast_formats import naming
from tests.checkpoints import cached_pages, forget
from tests.daemons import RunningDaemon, running, wait_until_read_back

ROWS, COLUMNS = 1024, 4096  # 16 MiB
RANKS = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon with a committed step that nobody holds in memory any more."""
    with running(tmp_path_factory.mktemp("cold") / "root", listen="127.0.0.1:0") as daemon:
        with Checkpointer("r", {"model": {"w": weight()}}, at=daemon.socket) as checkpointer:
            checkpointer.save(1, wait="durable")
        wait_until_read_back(daemon, "r", 1)
        yield daemon


def weight() -> torch.Tensor:
    return torch.randn((ROWS, COLUMNS), generator=torch.Generator().manual_seed(7))


def whole(rank: int) -> Fragment:
    return Fragment(torch.zeros(ROWS, COLUMNS), (ROWS, COLUMNS), offset=(0, 0))


def columns(rank: int) -> Fragment:
    """Some of every row, hence of every extent."""
    return Fragment(torch.zeros(ROWS, 1000), (ROWS, COLUMNS), offset=(0, rank * 1000))


def rows(rank: int) -> Fragment:
    """Some rows of its own: with those of three other ranks, all of the tensor."""
    return Fragment(torch.zeros(ROWS // 4, COLUMNS), (ROWS, COLUMNS), offset=(rank * ROWS // 4, 0))


def disk_read_bytes() -> int:
    """What this process has had the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])


@pytest.mark.parametrize("piece", [whole, columns])
def test_the_disk_is_read_once(
    saved: RunningDaemon, monkeypatch: pytest.MonkeyPatch, piece: Callable[[int], Fragment]
) -> None:
    """Replicas and strided parts alike: what one rank has read stands in the page cache for the others."""
    directory = saved.root / naming.checkpoint_path("r", 1)
    forget(directory)
    monkeypatch.setenv("HOLDFAST_LAUNCH", f"cold-{piece.__name__}")
    monkeypatch.setenv("WORLD_SIZE", str(RANKS))
    pieces = [piece(rank) for rank in range(RANKS)]
    checkpointers = []
    for rank, held in enumerate(pieces):
        monkeypatch.setenv("RANK", str(rank))
        checkpointers.append(Checkpointer("r", {"model": {"w": held}}, at=saved.socket))
    before = disk_read_bytes()
    with ThreadPoolExecutor(RANKS) as threads:
        assert (
            list(threads.map(lambda checkpointer: checkpointer.restore(1, groups=["model"]), checkpointers)) == [1] * RANKS
        )
    assert disk_read_bytes() - before < 1.5 * ROWS * COLUMNS * 4
    with open(directory / "model.safetensors", "rb") as file:
        assert cached_pages(file.fileno()) > ROWS * COLUMNS * 4 // 4096
    for held in pieces:
        (row, column), (rows, width) = held.offset, held.tensor.shape
        assert torch.equal(held.tensor, weight()[row : row + rows, column : column + width])
    for checkpointer in checkpointers:
        checkpointer.close(wait=False)


@pytest.mark.parametrize("part", [whole, rows])
def test_what_nobody_else_reads_goes_past_the_cache(
    saved: RunningDaemon, monkeypatch: pytest.MonkeyPatch, part: Callable[[int], Fragment]
) -> None:
    """The only rank of a machine, and one of several that have rows of their own, where the file system lets them."""
    directory = saved.root / naming.checkpoint_path("r", 1)
    if not direct.possible() or direct.open_direct(directory / "model.safetensors") is None:
        pytest.skip("this file system has no direct access")
    forget(directory)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1" if part is whole else "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("HOLDFAST_LAUNCH", f"alone-{part.__name__}")
    held = part(1)
    with Checkpointer("r", {"model": {"w": held}}, at=saved.socket) as checkpointer:
        assert checkpointer.restore(1, groups=["model"]) == 1
    (row, column), (count, width) = held.offset, held.tensor.shape
    assert torch.equal(held.tensor, weight()[row : row + count, column : column + width])
    with open(directory / "model.safetensors", "rb") as file:
        assert cached_pages(file.fileno()) < held.tensor.nbytes // 4096 // 2

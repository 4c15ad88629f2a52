"""Who dies while ranks of one machine restore together: the others restore all the same, and no memory is left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from holdfast import Checkpointer
from holdfast.link.unix_socket import SocketLink
from holdfast.read.overwrite_guard import Overwriting
from holdfast.read.requests import Want
from holdfast.read.root_directory import open_checkpoint
from holdfast.read.shared_load import BytesRead, Neighbours, fill
from holdfast_formats.region import Box
from holdfast_formats.staging import wire
from tests.daemons import RunningDaemon, wait_until
from tests.forked import Forked

SIZE = 100_000_003
RANK = """
import sys, time
from pathlib import Path
from holdfast.link.unix_socket import SocketLink
from holdfast.read.root_directory import open_checkpoint
from holdfast.read.shared_load import Neighbours
from holdfast_formats.disk import verification
from holdfast_formats.staging import wire

root, socket, peers = sys.argv[1:]
link = SocketLink(socket, lambda outcome: None, lambda error: None)
link.request(wire.Hello(id=link.next_id(), run="r", rank=9, world=10, launch="restored"), wire.Welcome)
reader = open_checkpoint(Path(root), None, "r", 1)
pieces = [piece for listed in verification.pieces(reader.manifest).values() for piece in listed]
print("ready", flush=True)
sys.stdin.readline()
memory, notes = Neighbours(link, int(peers)).borrow(1, pieces, True)
print(memory is not None, flush=True)
time.sleep(3600)
"""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon with a committed step, which stands in no slot any more."""
    daemon = RunningDaemon(tmp_path / "root")
    with Checkpointer("r", {"model": {"w": torch.from_numpy(content())}}, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    yield daemon
    if daemon.process.poll() is None:
        daemon.process.send_signal(signal.SIGCONT)
        assert daemon.stop() == 0, daemon.log.read_text()


def content() -> np.ndarray:
    return (np.arange(SIZE) % 251).astype(np.uint8)


class Restored(NamedTuple):
    """A restore of one rank: where it reads to, and what becomes of it."""

    into: np.ndarray
    filling: Future[BytesRead]

    def check(self, timeout_s: float = 60) -> BytesRead:
        """Every value is right."""
        found = self.filling.result(timeout_s)
        assert np.array_equal(self.into, content())
        return found


@contextmanager
def connected(daemon: RunningDaemon) -> Iterator[Callable[[int], list[Restored]]]:
    """Two ranks; calling what this gives makes them restore everything at the same time, with so many peers."""
    links = [SocketLink(daemon.socket, lambda outcome: None, lambda error: None) for _ in range(2)]
    for rank, link in enumerate(links):
        link.request(wire.Hello(id=link.next_id(), run="r", rank=rank, world=10, launch="restored"), wire.Welcome)

    def restore(peers: int) -> list[Restored]:
        made = []
        for link in links:
            into = np.zeros(SIZE, np.uint8)
            made.append(Restored(into, threads.submit(read, daemon.root, into, Neighbours(link, peers))))
        return made

    with ThreadPoolExecutor(2) as threads:
        yield restore
    for link in links:
        link.close()


def read(root: Path, into: np.ndarray, neighbours: Neighbours) -> BytesRead:
    with open_checkpoint(root, None, "r", 1) as reader:
        return fill(reader, [Want("model", "w", Box((0,), (SIZE,)), into)], neighbours, Overwriting(lambda: None))


def memfds(pid: int, *kinds: str) -> int:
    """How much lent memory (`load`), and how many questions (`wish`), a process has open."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(entry).startswith(tuple(f"/memfd:holdfast-{kind}" for kind in kinds))
    return count


def descriptors(daemon: RunningDaemon) -> int:
    """How many it has open, but for the catalog's: of those a thread more may take some for good."""
    count = 0
    for entry in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += "catalog.sqlite" not in os.readlink(entry)
    return count


@contextmanager
def another(daemon: RunningDaemon, peers: int) -> Iterator[Forked]:
    """A rank in a process of its own that asks for all of the step when told to, and never says that it is done."""
    process = Forked(["-c", RANK, daemon.root, daemon.socket, peers], talks=True)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def tell(process: Forked) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def test_the_daemon_is_killed_while_ranks_wait_for_it(daemon: RunningDaemon) -> None:
    """Both have asked and are not answered: each reads for itself and says why."""
    with connected(daemon) as restore:
        daemon.process.send_signal(signal.SIGSTOP)
        both = restore(2)
        time.sleep(0.1)
        assert not any(rank.filling.done() for rank in both)
        daemon.kill()
        for rank in both:
            found = rank.check()
            assert found.node_bytes == 0 and found.own_bytes > SIZE
            assert "not read together with the other ranks of this machine" in found.notes[0]


def test_the_daemon_is_killed_while_it_reads(daemon: RunningDaemon) -> None:
    """Its memory is half full, or just lent: whichever it is, each rank ends with every value."""
    with connected(daemon) as restore, another(daemon, 3) as process:  # which keeps what is lent, however quick these are
        tell(process)
        both = restore(3)
        wait_until(lambda: memfds(daemon.process.pid, "load") > 0)
        daemon.kill()
        for rank in both:
            rank.check()


def test_a_rank_is_killed_while_it_waits(daemon: RunningDaemon) -> None:
    """It had asked, and was dead when its question was read: the two others share, and nothing is kept for it."""
    before = descriptors(daemon)
    with connected(daemon) as restore, another(daemon, 3) as process:
        daemon.process.send_signal(signal.SIGSTOP)
        tell(process)
        wait_until(lambda: memfds(process.pid, "wish") > 0)
        time.sleep(0.1)  # until it has sent its question and waits
        process.kill()
        process.wait()
        both = restore(3)
        daemon.process.send_signal(signal.SIGCONT)
        for rank in both:
            found = rank.check()
            assert found.own_bytes == 0 and found.node_bytes > SIZE
    wait_until(lambda: memfds(daemon.process.pid, "load", "wish") == 0 and descriptors(daemon) <= before)


def test_a_rank_is_killed_that_holds_lent_memory(daemon: RunningDaemon) -> None:
    """As long as it lives the daemon keeps the memory for it; when it is dead, no descriptor of that is left."""
    before = descriptors(daemon)
    with connected(daemon) as restore, another(daemon, 3) as process:
        tell(process)
        for rank in restore(3):
            assert rank.check().own_bytes == 0
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        assert memfds(daemon.process.pid, "load", "wish") == 1
        process.kill()
        process.wait()
        wait_until(lambda: memfds(daemon.process.pid, "load") == 0)
    wait_until(lambda: descriptors(daemon) <= before)

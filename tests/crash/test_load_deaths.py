"""The daemon dies while ranks of its machine restore: each of them reads on, and ends with every value."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast import Checkpointer
from holdfast.link import unix_socket
from holdfast.link.exchange import connect
from holdfast.link.unix_socket import SocketLink
from holdfast.read.memory_load import Filled, fill
from holdfast.read.overwrite_guard import Overwriting
from holdfast.read.requests import Want
from holdfast.read.root_directory import open_checkpoint
from holdfast_formats.region import Box
from holdfast_formats.staging import wire
from tests.daemons import RunningDaemon

SIZE = 10_000_003
RANKS = 2


class Position:
    """Where a data loader stands. Once every rank's was restored the daemon is killed, and they go on."""

    def __init__(self, restored: threading.Barrier | None = None) -> None:
        self.position, self._restored = 7 if restored is None else 0, restored

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        if self._restored is not None:
            self._restored.wait(180)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon with a committed step, which stands in no slot any more."""
    daemon = RunningDaemon(tmp_path / "root")
    with Checkpointer("r", {"model": {"w": torch.from_numpy(content())}, "loader": Position()}, at=daemon.socket) as first:
        first.save(1, wait="durable")
    yield daemon
    if daemon.process.poll() is None:
        daemon.thaw()
        assert daemon.stop() == 0, daemon.log.read_text()


def content() -> np.ndarray:
    return np.resize(np.arange(251, dtype=np.uint8), SIZE)  # a division for each byte would take seconds


def read(root: Path, link: SocketLink, into: np.ndarray) -> Filled:
    with open_checkpoint(root, None, "r", 1) as reader:
        wanted = [Want("model", "w", Box((0,), (SIZE,)), into)]
        return fill(reader, wanted, link, 0, Overwriting(lambda: None))


def test_the_daemon_is_killed_while_ranks_ask_it_for_slots(daemon: RunningDaemon, request: pytest.FixtureRequest) -> None:
    """Both have asked and are not answered: each reads the files and says why."""
    links = [SocketLink(daemon.socket, lambda outcome: None, lambda error: None) for _ in range(RANKS)]
    for link in links:
        request.addfinalizer(link.close)
    for rank, link in enumerate(links):
        link.request(wire.Hello(id=link.next_id(), run="r", rank=rank, world=RANKS, launch="restored"), wire.Welcome)
    states = [np.zeros(SIZE, np.uint8) for _ in links]
    with ThreadPoolExecutor(RANKS) as threads:
        daemon.freeze()
        filling = [threads.submit(read, daemon.root, link, into) for link, into in zip(links, states, strict=True)]
        time.sleep(0.1)
        assert not any(each.done() for each in filling)
        daemon.kill()
        for each, into in zip(filling, states, strict=True):
            found = each.result(180)
            assert not found.from_slots and "the in-memory checkpoint could not be used" in found.notes[0]
            assert np.array_equal(into, content())


def test_the_daemon_is_killed_before_ranks_say_how_it_went(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank has all of the step, and no daemon hears of it: the restore of each succeeds. Meanwhile the next daemon
    is looked for with pauses.
    """
    dialled: list[Path] = []

    def counted(path: Path) -> socket.socket:
        dialled.append(path)
        return connect(path)

    monkeypatch.setattr(unix_socket, "MEND_WAIT_S", 2.0)
    monkeypatch.setattr(unix_socket, "connect", counted)
    restored = threading.Barrier(RANKS, daemon.kill)
    states = [{"model": {"w": torch.zeros(SIZE, dtype=torch.uint8)}, "loader": Position(restored)} for _ in range(RANKS)]
    checkpointers = ranks(daemon, states, monkeypatch)
    with ThreadPoolExecutor(RANKS) as threads:
        assert list(threads.map(lambda checkpointer: checkpointer.restore(), checkpointers)) == [1] * RANKS
    for state in states:
        assert np.array_equal(state["model"]["w"].numpy(), content()) and state["loader"].position == 7
    for checkpointer in checkpointers:
        checkpointer.close(wait=False)
    assert RANKS < len(dialled) < RANKS * 2 * unix_socket.MEND_S / unix_socket.MEND_PAUSE_S


def ranks(daemon: RunningDaemon, states: Sequence[dict], monkeypatch: pytest.MonkeyPatch) -> list[Checkpointer]:
    """Checkpointers of one launch, as the ranks of one machine have them."""
    monkeypatch.setenv("HOLDFAST_LAUNCH", "restored")
    monkeypatch.setenv("WORLD_SIZE", str(len(states)))
    made = []
    for rank, state in enumerate(states):
        monkeypatch.setenv("RANK", str(rank))
        made.append(Checkpointer("r", state, at=daemon.socket))
    return made

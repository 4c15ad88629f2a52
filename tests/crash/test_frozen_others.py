"""SIGSTOP of a rank, of the holder and of a watcher: no other rank waits for it, and the daemon goes on."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.rest.api import Api
from tests.crash import ledger
from tests.crash.launches import holders
from tests.crash.points import Place, place
from tests.crash.steady_trainer import FROZEN_AT
from tests.crash.test_frozen_daemons import Stalls, Trainers, busy, check_sound, thawed
from tests.daemons import RunningDaemon, wait_until

__all__ = ["place", "thawed"]

LANE = "others frozen"
SPREAD_S = 4.0
ANSWER_S = 60.0  # for what takes a moment, on a machine that does much else


def stalls_of(trainers: Trainers, rank: int, over_http: bool) -> Stalls:
    """How long the saves of a rank took, once it has told."""

    def told() -> list[list[str]]:
        assert trainers.ranks[rank].poll() is None, trainers.said
        return [line.split()[1:] for line in list(trainers.said[rank]) if line.startswith("stalls")]

    wait_until(lambda: told(), 300)
    return Stalls("", over_http, rank, list(map(float, told()[0])))


def go(trainers: Trainers, rank: int) -> None:
    stdin = trainers.ranks[rank].stdin
    assert stdin is not None
    stdin.write("go\n")


def saves_another(daemon: RunningDaemon, run: str) -> None:
    """A launch of another run begins, and its save is committed."""
    failed: list[BaseException] = []

    def save() -> None:
        try:
            with Checkpointer(run, {"model": {"w": torch.ones(1000)}}, at=daemon.socket) as another:
                another.save(1, wait="durable")
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=save, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    assert not thread.is_alive() and not failed, failed


def ended(trainers: Trainers, daemon: RunningDaemon, root: Path) -> None:
    """All ranks save on, and what they were told to be committed is whole."""
    trainers.go()
    both = sorted(set.intersection(*({int(word) for word in words} for words in trainers.hear("committed"))))
    assert len(both) >= FROZEN_AT
    trainers.end()
    assert daemon.stop() == 0, daemon.log.read_text()
    check_sound(root, both)


@pytest.mark.parametrize("over_http", [False, pytest.param(True, marks=pytest.mark.crash_slow)], ids=["socket", "http"])
def test_a_stopped_rank_stalls_no_other(over_http: bool, place: Place, thawed: list[RunningDaemon]) -> None:
    """Its part is missing, so nothing is committed until it goes on; the other rank's saves return, and other runs save."""
    ledger.tried(LANE)
    daemon = RunningDaemon(place.root, listen="127.0.0.1:0")
    thawed.append(daemon)
    at = daemon.url if over_http else str(daemon.socket)
    trainers = Trainers(at, daemon.process.pid, "nowhere", SPREAD_S)
    try:
        trainers.hear("ready")
        trainers.go()
        trainers.hear("saving")
        trainers.ranks[1].send_signal(signal.SIGSTOP)
        go(trainers, 0)
        assert stalls_of(trainers, 0, over_http).within(busy())
        saves_another(daemon, "another")
        with Api(daemon.url) as api:
            assert {run.name for run in api.runs()} == {"another", "r"}
        trainers.ranks[1].send_signal(signal.SIGCONT)
        go(trainers, 1)
        assert stalls_of(trainers, 1, over_http).within(busy())
        ended(trainers, daemon, place.root)
    finally:
        trainers.ranks[1].send_signal(signal.SIGCONT)
        trainers.end()
    ledger.survived(LANE)


def test_a_stopped_holder_stalls_nobody(place: Place, thawed: list[RunningDaemon]) -> None:
    """It keeps the memory, and answers nothing: ranks save, and a launch that needs new memory begins, for which another one
    takes its place. It ends when it goes on: else it would keep the memory.
    """
    ledger.tried(LANE)
    daemon = RunningDaemon(place.root, listen="127.0.0.1:0")
    thawed.append(daemon)
    trainers = Trainers(str(daemon.socket), daemon.process.pid, "nowhere", SPREAD_S)
    stopped: list[int] = []
    try:
        trainers.hear("ready")
        stopped = holders(place.root.parent)
        assert len(stopped) == 1
        os.kill(stopped[0], signal.SIGSTOP)
        trainers.go()
        trainers.hear("saving")
        trainers.go()
        assert all(stalls_of(trainers, rank, False).within(busy()) for rank in range(2))
        saves_another(daemon, "another")
        assert len(holders(place.root.parent)) == 2
        os.kill(stopped[0], signal.SIGCONT)
        wait_until(lambda: len(holders(place.root.parent)) == 1 and stopped != holders(place.root.parent))
        ended(trainers, daemon, place.root)
    finally:
        for pid in holders(place.root.parent):
            os.kill(pid, signal.SIGCONT)
        trainers.end()
    ledger.survived(LANE)


@pytest.mark.crash_slow
def test_a_stopped_watcher_stalls_nobody(place: Place, thawed: list[RunningDaemon]) -> None:
    """It asks for all events, and reads nothing: the daemon that it watches saves and answers. A watched daemon that is
    stopped keeps its watcher from nothing, either.
    """
    ledger.tried(LANE)
    daemon = RunningDaemon(place.root, listen="127.0.0.1:0")
    watcher = RunningDaemon(place.root.with_name("watching"), "--watch", daemon.url, listen="127.0.0.1:0")
    thawed += [daemon, watcher]
    trainers = Trainers(str(daemon.socket), daemon.process.pid, "nowhere", SPREAD_S)
    try:
        trainers.hear("ready")
        watcher.freeze()
        trainers.go()
        trainers.hear("saving")
        trainers.go()
        assert all(stalls_of(trainers, rank, False).within(busy()) for rank in range(2))
        saves_another(daemon, "another")
        watcher.thaw()
        daemon.freeze()
        saves_another(watcher, "own")
        with Api(watcher.url) as api:
            assert [run.name for run in api.runs()] == ["own"]
        daemon.thaw()
        assert watcher.stop() == 0
        ended(trainers, daemon, place.root)
    finally:
        trainers.end()
    ledger.survived(LANE)

"""SIGSTOP of the daemon, at any point of a save and for long: training goes on, and every commit that was told is whole."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.read.root_directory import committed_steps, open_checkpoint
from tests.crash import ledger
from tests.crash.steady_trainer import FROZEN_AT, SIZE
from tests.crash.test_kills import Place, place, stop_at
from tests.daemons import RunningDaemon, hide, wait_until
from tests.forked import Forked

LANE = "daemons frozen"
POINTS = ("before lease", "in copy", "in a seal", "sealed", "mid write", "before COMMIT", "after rename", "idle")
IN_THE_DAEMON = ("in a seal", "mid write", "before COMMIT", "after rename")
SHORT_S, LONG_S = 2.0, 75.0  # longer than every deadline of a minute that is counted beside it
SAVES, WORLD = 10, 2
SHARE_S = 8.0  # of all saves of a rank: each used to wait ten seconds, and up to 130

__all__ = ["place"]


class Trainers:
    """The ranks of a launch and their lines."""

    def __init__(self, at: str, pid: int, point: str) -> None:
        about = {**os.environ, "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "HOLDFAST_LAUNCH": uuid.uuid4().hex}
        self.said: list[list[str]] = [[] for _ in range(WORLD)]
        self.ranks, self.readers = [], []
        for rank in range(WORLD):
            words = ["-m", "tests.crash.steady_trainer", at, pid, point, SAVES]
            about |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            self.ranks.append(Forked(words, dict(about), talks=True))
            self.readers.append(threading.Thread(target=self._read, args=(rank,), daemon=True))
            self.readers[-1].start()

    def _read(self, rank: int) -> None:
        for line in self.ranks[rank].stdout or ():
            self.said[rank].append(line.strip())

    def hear(self, word: str, timeout_s: float = 240.0) -> list[list[str]]:
        """The words after this one, of every rank."""

        def lines() -> list[str]:
            assert all(rank.poll() in (None, 0) for rank in self.ranks), self.said
            return [line for said in self.said for line in said if line.split()[0] == word]

        wait_until(lambda: len(lines()) == WORLD, timeout_s)
        return [line.split()[1:] for line in lines()]

    def go(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")

    def end(self) -> None:
        for rank, reader in zip(self.ranks, self.readers, strict=True):
            rank.kill()
            rank.wait()
            reader.join()
            for pipe in (rank.stdin, rank.stdout):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def thawed() -> Iterator[list[RunningDaemon]]:
    daemons: list[RunningDaemon] = []
    yield daemons
    for daemon in daemons:
        daemon.thaw()
        if daemon.process.poll() is None:
            daemon.kill()


def check_sound(root: Path, steps: list[int]) -> None:
    """What was told to be committed is there, and every checkpoint has both ranks' values of one step, byte by byte."""
    visible = committed_steps(root, "r")
    assert set(steps) <= set(visible), (steps, visible)
    for step in visible:
        with open_checkpoint(root, None, "r", step) as reader:
            assert reader.verify() == []
            for rank in range(WORLD):
                assert np.array_equal(reader.read("model", f"w{rank}"), np.full(SIZE, rank - step, np.float32)), (step, rank)


def frozen(point: str, over_http: bool, freeze_s: float, here: Place, thawed: list[RunningDaemon]) -> None:
    daemon = RunningDaemon(here.root, listen="127.0.0.1:0")
    thawed.append(daemon)
    if over_http:
        hide(daemon)
    trainers = Trainers(daemon.url if over_http else str(daemon.socket), daemon.process.pid, point)
    try:
        trainers.hear("ready")
        if point in IN_THE_DAEMON:
            (here.marks / "armed").touch()
        trainers.go()
        if point in IN_THE_DAEMON:
            wait_until(lambda: here.stopped is not None)
            daemon.freeze()
            (here.marks / "go").touch()
        trainers.hear("saving")
        began = time.monotonic()
        trainers.go()
        told = trainers.hear("stalls")
        stalls = [[float(word) for word in words] for words in told]
        print(f"{point}: {max(map(max, stalls)):.2f} s the longest, {max(map(sum, stalls)):.2f} s in all")
        assert all(sum(each) < SHARE_S for each in stalls), stalls
        time.sleep(max(began + freeze_s - time.monotonic(), 0))
        daemon.thaw()
        trainers.go()
        committed = [{int(word) for word in words} for words in trainers.hear("committed")]
        both = sorted(set.intersection(*committed))
        assert len(both) >= FROZEN_AT, committed
        # The first two are not staged yet: such a save may fail by its ticket, or still be in time.
        assert point in ("before lease", "in copy") or FROZEN_AT in both or over_http, committed
    finally:
        daemon.thaw()
        trainers.end()
    if over_http:
        os.rename(daemon.socket.with_suffix(".hidden"), daemon.socket)
    assert daemon.stop() == 0, daemon.log.read_text()
    check_sound(here.root, both)


@pytest.mark.parametrize(("point", "over_http"), [("in copy", False), ("mid write", True)])
def test_frozen_for_a_moment(
    point: str, over_http: bool, place: Place, thawed: list[RunningDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved meanwhile fails at once by its ticket or is staged; what was staged is committed afterwards."""
    ledger.tried(LANE)
    stop_at(point if point in IN_THE_DAEMON else "mid write", place, monkeypatch)
    frozen(point, over_http, SHORT_S, place, thawed)
    ledger.survived(LANE)


@pytest.mark.crash_slow
@pytest.mark.parametrize("over_http", [False, True], ids=["socket", "http"])
@pytest.mark.parametrize("point", POINTS)
def test_frozen_for_long(
    point: str,
    over_http: bool,
    place: Place,
    thawed: list[RunningDaemon],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same, for longer than everything that is given up after a minute; FROZEN_S says for how long."""
    ledger.tried(LANE)
    stop_at(point if point in IN_THE_DAEMON else "mid write", place, monkeypatch)
    frozen(point, over_http, float(os.environ.get("FROZEN_S", LONG_S)), place, thawed)
    ledger.survived(LANE)

"""SIGSTOP of the daemon, at any point of a save and for long: training goes on, and every commit that was told is whole."""

from __future__ import annotations

import os
import statistics
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from tests.crash import ledger
from tests.crash.points import Place, place, stop_at
from tests.crash.steady_trainer import FROZEN_AT, SIZE
from tests.daemons import RunningDaemon, hide, wait_until
from tests.forked import Forked

LANE = "daemons frozen"
POINTS = ("before lease", "in copy", "in a seal", "sealed", "mid write", "before COMMIT", "after rename", "idle")
IN_THE_DAEMON = ("in a seal", "mid write", "before COMMIT", "after rename")
SHORT_S = 2.0
SAVES, WORLD = 20, 2
LONGEST_S, SHARE_S = 1.0, 1.5  # of one save of a rank, and of all its saves while the daemon is frozen
BUSY = 4.0  # where the machine does much else, these bounds are at least so many times as long (`busy`)
TOGETHER = 4  # cases at a time: they mostly sleep
STARTING = threading.Lock()

__all__ = ["place"]


class Trainers:
    """The ranks of a launch and their lines."""

    def __init__(self, at: str, pid: int, point: str, spread_s: float) -> None:
        about = {**os.environ, "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD), "HOLDFAST_LAUNCH": uuid.uuid4().hex}
        self.said: list[list[str]] = [[] for _ in range(WORLD)]
        self.ranks, self.readers = [], []
        for rank in range(WORLD):
            words = ["-m", "tests.crash.steady_trainer", at, pid, point, SAVES, spread_s]
            about |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            self.ranks.append(Forked(words, dict(about), talks=True))
            self.readers.append(threading.Thread(target=self._read, args=(rank,), daemon=True))
            self.readers[-1].start()

    def _read(self, rank: int) -> None:
        for line in self.ranks[rank].stdout or ():
            self.said[rank].append(line.strip())

    def hear(self, word: str, timeout_s: float = 900.0) -> list[list[str]]:
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


def busy(least: float = BUSY, load: float | None = None) -> float:
    """How many times as long everything may take: as many processes as want each processor, now or at that load."""
    return max((os.getloadavg()[0] if load is None else load) / (os.cpu_count() or 1), least)


class Stalls(NamedTuple):
    """How long the saves of a rank took while its daemon was frozen, in seconds."""

    point: str
    over_http: bool
    rank: int
    each: list[float]

    def within(self, times: float) -> bool:
        return sum(self.each) <= times * SHARE_S and max(self.each) <= times * LONGEST_S

    def __str__(self) -> str:
        told = f"{self.point:14} {'HTTP' if self.over_http else 'socket':6} {self.rank:4} {len(self.each):5}"
        return f"{told} {sum(self.each):7.2f} {max(self.each):8.2f} {1000 * statistics.median(self.each):9.1f}"


HEADINGS = f"{'frozen':14} {'over':6} rank saves {'sum, s':>7} {'longest':>8} {'median, ms':>9}"


def frozen(
    point: str, over_http: bool, freeze_s: float, here: Place, thawed: list[RunningDaemon], patch: pytest.MonkeyPatch
) -> list[Stalls]:
    """Freeze a daemon at a point of a save, and check what came of all saves; how long they took, for each rank."""
    with STARTING:  # it finds in the environment where to stop
        stop_at(point if point in IN_THE_DAEMON else "mid write", here, patch)
        daemon = RunningDaemon(here.root, listen="127.0.0.1:0")
        thawed.append(daemon)
    if over_http:
        hide(daemon)
    trainers = Trainers(daemon.url if over_http else str(daemon.socket), daemon.process.pid, point, 0.9 * freeze_s)
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
        stalls = [Stalls(point, over_http, rank, list(map(float, words))) for rank, words in enumerate(told)]
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
    return stalls


@pytest.mark.parametrize(("point", "over_http"), [("in copy", False), ("mid write", True)])
def test_frozen_for_a_moment(
    point: str, over_http: bool, place: Place, thawed: list[RunningDaemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is saved meanwhile fails at once by its ticket or is staged; what was staged is committed afterwards."""
    ledger.tried(LANE)
    stalls = frozen(point, over_http, SHORT_S, place, thawed, monkeypatch)
    print("\n".join([HEADINGS, *map(str, stalls)]))
    assert all(one.within(busy()) for one in stalls)
    ledger.survived(LANE)


@pytest.mark.crash_slow
def test_frozen_for_long(
    place: Place, thawed: list[RunningDaemon], monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """The same at every point, over the socket and over HTTP, for longer than everything that is given up after a minute;
    `--frozen-s` says for how long. Half of the saves come at once, the others are spread over that time.
    """
    freeze_s = float(pytestconfig.getoption("--frozen-s"))
    cases = [(point, over_http) for point in POINTS for over_http in (False, True)]
    failed: list[str] = []
    loads: list[float] = []

    def one(number: int) -> list[Stalls]:
        point, over_http = cases[number]
        ledger.tried(LANE)
        here = Place(place.root.with_name(f"root-{number}"), place.marks / str(number))
        here.marks.mkdir()
        try:
            stalls = frozen(point, over_http, freeze_s, here, thawed, monkeypatch)
        except Exception:  # the others are still to be seen
            failed.append(f"{point}, {'HTTP' if over_http else 'socket'}: {traceback.format_exc()}")
            return []
        loads.append(os.getloadavg()[0])
        ledger.survived(LANE)
        return stalls

    with ThreadPoolExecutor(TOGETHER) as pool:
        table = [stalls for found in pool.map(one, range(len(cases))) for stalls in found]
    times = busy(1.0, statistics.median(loads))
    print(f"\nfrozen for {freeze_s:.0f} s; {times:.1f} processes for each processor", HEADINGS, *table, sep="\n")
    assert not failed, "\n".join(failed)
    assert all(one.within(times) for one in table)

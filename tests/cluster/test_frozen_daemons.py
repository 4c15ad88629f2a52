"""SIGSTOP of a daemon that shares its root with others, at any point of a save or of a removal, for longer than its lease:
training goes on, others take over, and what the stopped daemon does once it goes on loses nothing and undoes nothing.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Checkpointer
from holdfast.launch import Launch, assigned
from holdfast.read.root_directory import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.posix import PosixTier
from tests.cluster.test_joint_rounds import how_it_ended
from tests.cluster.test_named_points import POINTS as IN_A_ROUND
from tests.cluster.test_named_points import Marks
from tests.crash.points import STOPS
from tests.daemons import wait_until
from tests.databases import Postgres
from tests.regressions.joint_worlds import Ranks, ranks
from tests.regressions.test_many_daemons import Daemon, Site, nodes, steps

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.cluster_slow,
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that a stopped daemon has ended
]

ALONE = ("before COMMIT", "before rename", "after rename", "before the catalog", "mid rotation")
TOGETHER = 3  # cases at a time: they mostly sleep, and PostgreSQL has connections for so many
STALL_MAX_S = 4.0  # of one save(): one second, and the machine does much else
BACK_S = 240.0  # within which saves are committed again
STARTING = threading.Lock()  # daemons find in the environment where to stop
Start = Callable[[str], Site]


@pytest.fixture
def start(tmp_path: Path, postgres: Postgres) -> Iterator[Start]:
    """Makes places with a root and a catalog of their own; every daemon goes on, and ends, afterwards."""
    made: list[Site] = []

    def new(name: str) -> Site:
        made.append(Site(tmp_path / name / "root", postgres, postgres.take()))
        made[-1].root.parent.mkdir()
        return made[-1]

    yield new
    for site in made:
        for daemon in site.daemons:
            if daemon.process.poll() is None:
                daemon.thaw()
                daemon.kill()
        postgres.give_back(site.url)


class Stops:
    """Two nodes of a place, whose daemons stop at a point once it is armed."""

    def __init__(self, site: Site, point: str, patch: pytest.MonkeyPatch) -> None:
        self.site, self.point = site, point
        self._directory = site.root.parent / "marks"
        with STARTING:
            patch.setenv("PYTHONPATH", str(STOPS))
            patch.setenv("CRASH_POINT", point)
            patch.setenv("CRASH_DIRECTORY", str(self._directory))
            self.marks = Marks(self._directory)
            self.daemons = {name: site.start(name) for name in "ab"}

    def arm(self) -> None:
        self.marks.arm(self.point)

    def freeze(self) -> Daemon:
        """Stop the daemon that has come to the point."""
        stopped = self.daemons[self.marks.victim(self.daemons)]
        stopped.freeze()
        (self._directory / "go").touch()
        return stopped

    def wait_until_back(self, daemon: Daemon) -> None:
        """The daemon is a member again, and has had time to do what it was in the middle of."""
        wait_until(lambda: nodes(daemon)[daemon.name]["live"], BACK_S)
        time.sleep(5)

    def end(self) -> None:
        for daemon in self.daemons.values():
            daemon.kill()

    def check(self) -> None:
        """All checkpoints are sound."""
        for step in steps(self.site.root, "run"):
            verify(PosixTier(self.site.root), naming.checkpoint_path("run", step))


def at_every(points: Sequence[str], case: Callable[[str], str]) -> None:
    """Some cases at a time; all that failed are named."""
    failed: list[str] = []

    def one(point: str) -> None:
        try:
            print(f"{point}: {case(point)}", flush=True)
        except Exception:
            failed.append(f"{point}: {traceback.format_exc()}")

    with ThreadPoolExecutor(TOGETHER) as pool:
        list(pool.map(one, points))
    assert not failed, "\n".join(failed)


def timed(world: Ranks, step: int) -> tuple[list[Any], float]:
    """The tickets of a save on all ranks, where there are some, and how long the longest save() took."""
    longest: list[float] = []

    def save(rank: int, one: Checkpointer) -> Any:
        began = time.monotonic()
        ticket = one.save(step)
        longest.append(time.monotonic() - began)
        return ticket

    world.set(step)
    return world.each(save), max(longest)


def test_stopped_at_every_point_of_a_joint_save(
    start: Start, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """Two nodes save together. No save() waits, what a rank hears to be committed stands, and once the daemon goes on the
    next saves are committed and both nodes restore them.
    """
    freeze_s = float(pytestconfig.getoption("--frozen-s"))

    def case(point: str) -> str:
        here = Stops(start(f"joint-{IN_A_ROUND.index(point)}"), point, monkeypatch)
        with ranks("run", list(here.daemons.values()), f"frozen {point}", slots=3) as world:
            for ticket in world.save(1):
                ticket.result()
            here.arm()
            tickets = {2: world.save(2, wait=None)}
            stopped, began, longest = here.freeze(), time.monotonic(), 0.0
            for step in range(3, 9):
                tickets[step], stall = timed(world, step)
                longest = max(longest, stall)
                time.sleep(freeze_s / 8)
            time.sleep(max(began + freeze_s - time.monotonic(), 0))
            stopped.thaw()
            newest = _saves_again(world)
            heard = {step: {how_it_ended(ticket) for ticket in made} for step, made in tickets.items()}
            for step, ends in heard.items():
                assert "committed" not in ends or step in steps(here.site.root, "run"), (step, ends)
            assert longest < STALL_MAX_S
            here.check()
            world.set(0)
            assert set(world.each(lambda rank, one: one.restore(step=newest))) == {newest}
            world.check(newest)
        here.end()
        return f"node {stopped.name}, longest save() {longest:.2f} s, {[sorted(ends) for ends in heard.values()]}"

    at_every(IN_A_ROUND, case)


def _saves_again(world: Ranks) -> int:
    """Saves until one is committed for all ranks; its step."""
    limit, step = time.monotonic() + BACK_S, 100
    while True:
        step += 1
        tickets, _ = timed(world, step)
        if {how_it_ended(ticket) for ticket in tickets} == {"committed"}:
            return step
        assert time.monotonic() < limit, "no save is committed any more"
        time.sleep(1)


@pytest.mark.parametrize("first", ["the other saves", "it continues"])
def test_stopped_while_its_run_is_taken_over(
    start: Start, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, first: str
) -> None:
    """A run goes on at another node, from what that one restores; the daemon goes on before or after it has saved. What the
    new launch commits is what it has saved, and stays.
    """
    freeze_s = float(pytestconfig.getoption("--frozen-s"))

    def case(point: str) -> str:
        here = Stops(start(f"over-{ALONE.index(point)}"), point, monkeypatch)
        before = _Trainer(here.daemons["a"], "before", 0.0)
        for step in (1, 2, 3):
            before.save(step)
        here.arm()
        before.save(4, wait=False)
        stopped, began = here.freeze(), time.monotonic()
        assert stopped is here.daemons["a"]
        closing = threading.Thread(target=before.close)
        closing.start()
        after = _Trainer(here.daemons["b"], "after", 1000.0)
        restored = after.restored
        assert restored in (3, 4) and after.value == restored
        if first == "it continues":
            time.sleep(max(began + freeze_s - time.monotonic(), 0))
            stopped.thaw()
            here.wait_until_back(stopped)
        saved = [restored + 1, restored + 2]
        for step in saved:
            after.save(step)
        if first != "it continues":
            time.sleep(max(began + freeze_s - time.monotonic(), 0))
            stopped.thaw()
            here.wait_until_back(stopped)
        closing.join(BACK_S)
        after.close()
        root = here.site.root
        assert set(saved) <= set(steps(root, "run")), (saved, steps(root, "run"))
        here.check()
        for step in steps(root, "run"):
            with open_checkpoint(root, None, "run", step) as reader:
                value = float(reader.read("model", "weight")[0])
            assert value == (1000.0 + step if step in saved else step), (step, value)
        for daemon in here.daemons.values():
            last = _Trainer(daemon, f"last {daemon.name}", 0.0)
            assert (last.restored, last.value) == (saved[-1], 1000.0 + saved[-1])
            last.close()
        here.end()
        return f"restored {restored}, {steps(root, 'run')} stand"

    at_every(ALONE, case)


class _Trainer:
    """A launch of one rank; what it saves at a step is the step and something of its own."""

    def __init__(self, daemon: Daemon, name: str, adds: float) -> None:
        self._state, self._adds = {"model": {"weight": torch.zeros(200_000)}}, adds
        with assigned(lambda: Launch(0, 1, f"{name} {daemon.root}", 1)):
            self._checkpointer = Checkpointer("run", self._state, at=daemon.socket, keep_last=3)
        limit = time.monotonic() + BACK_S
        while True:
            try:
                self.restored = self._checkpointer.restore()
                return
            except CheckpointError:  # the run is busy until its node's lease has ended
                assert time.monotonic() < limit
                time.sleep(1)

    @property
    def value(self) -> float:
        return float(self._state["model"]["weight"][0])

    def save(self, step: int, wait: bool = True) -> None:
        self._state["model"]["weight"].fill_(self._adds + step)
        ticket = self._checkpointer.save(step)
        if wait:
            ticket.result(BACK_S)

    def close(self) -> None:
        self._checkpointer.close(wait=False)

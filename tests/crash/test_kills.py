"""SIGKILL at named points of trainer, rank, daemon, embedded daemon and command line: a table of real processes (bar 1).

The process that comes to the point waits there, the victim is killed, the others go on. Afterwards what was announced is
there and whole, what every rank had sealed is committed, a new launch restores it bit by bit, and saves.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from holdfast.read.root_directory import committed_steps, open_checkpoint
from holdfast_formats import naming
from tests.crash import ledger
from tests.crash.rank_process import content
from tests.crash.test_daemon_deaths import holders, processes
from tests.daemons import RunningDaemon, runtime_directory, wait_until

LANE = "kills at named points"
RUN, WORLD, SIZE = "r", 2, 300_007
KEEP = 2
HOLDFAST = (sys.executable, "-c", "from holdfast.cli import main; main()")
STOPS = Path(__file__).with_name("stops")
VICTIMS = ("trainer", "one rank", "daemon", "embedded daemon")
IN_A_RANK = ("before stage", "mid stage", "staged", "sealed")
IN_THE_DAEMON = (
    *("mid write", "before manifest", "before COMMIT", "before rename", "after rename", "before the catalog"),
    "mid rotation",
)
IN_MAKE_TEST = {
    ("before COMMIT", "daemon"),
    ("mid stage", "one rank"),
}
_launches = itertools.count()
_started: list[subprocess.Popen[str]] = []


class Place(NamedTuple):
    """A root, where the daemon's socket is, and where a stopped process leaves its mark."""

    root: Path
    marks: Path

    @property
    def stopped(self) -> int | None:
        """The process that waits at the point."""
        text = (self.marks / "hit").read_text() if (self.marks / "hit").exists() else ""
        return int(text) if text.endswith("\n") else None


class Ranks:
    """The processes of a launch, and what each of them has said so far."""

    def __init__(self, place: Place, daemon: RunningDaemon | None, steps: str) -> None:
        launch = f"launch-{next(_launches)}"
        self.said: list[list[str]] = [[] for _ in range(WORLD)]
        self._readers, self.processes = [], []
        socket = str(daemon.socket) if daemon is not None else "-"
        for rank in range(WORLD):
            given = [str(place.root), socket, RUN, str(rank), str(WORLD), launch, steps, str(SIZE)]
            command = [sys.executable, "-m", "tests.crash.acting_rank", *given]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
            reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
            reader.start()
            _started.append(process)
            self._readers.append(reader)
            self.processes.append(process)

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said[rank].append(line.strip())

    def wait_for(self, line: str) -> None:
        """Wait until every rank that lives has said a line."""
        wait_until(
            lambda: all(line in said for said, p in zip(self.said, self.processes, strict=True) if p.poll() is None), 60
        )
        assert any(line in said for said in self.said), (line, self.said)

    def go(self) -> None:
        """Let the ranks pass the line at which they wait."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")

    def kill(self, *ranks: int) -> None:
        for rank in ranks or range(WORLD):
            self.processes[rank].kill()
            self.processes[rank].wait()

    def end(self) -> None:
        """No rank is left."""
        self.kill()
        for process, reader in zip(self.processes, self._readers, strict=True):
            reader.join()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


@pytest.fixture
def place() -> Iterator[Place]:
    """A short path, for sockets; afterwards no process is left that began here."""
    with runtime_directory() as directory:
        made = Place(directory / "root", directory / "marks")
        made.marks.mkdir()
        yield made
        (made.marks / "go").touch()
        for process in _started:
            process.kill()
        _started.clear()
        for pid in processes(directory, b"\0holdfast_service\0"):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: holders(directory) == [], 20)


def stop_at(point: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from here on know the point."""
    path = os.pathsep.join(filter(None, [str(STOPS), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("CRASH_POINT", point)
    monkeypatch.setenv("CRASH_DIRECTORY", str(place.marks))


def embedded_pid(place: Place) -> int:
    return int(json.loads((place.root / naming.DAEMON_FILE).read_bytes())["pid"])


def check_sound(root: Path, visible: list[int]) -> None:
    """Every visible step holds what the ranks saved, and nothing else stands beside them."""
    assert sorted(committed_steps(root, RUN)) == visible
    assert len(os.listdir(root / RUN / naming.CHECKPOINTS)) == len(visible)
    for step in visible:
        with open_checkpoint(root, None, RUN, step) as reader:
            assert reader.verify() == []
            assert np.array_equal(reader.read("model", "w"), content(step, 0, WORLD * SIZE))


def is_empty(root: Path, room: str) -> bool:
    directory = root / RUN / room
    return not directory.is_dir() or not any(directory.iterdir())


def kill(victim: str, place: Place, ranks: Ranks, daemon: RunningDaemon | None) -> None:
    """End the victim as a power cut would, while some process waits at the point."""
    if victim == "daemon":
        assert daemon is not None
        daemon.kill()
    elif victim == "embedded daemon":
        os.kill(embedded_pid(place), signal.SIGKILL)
    elif victim == "one rank":  # the one at the point, if it is a rank
        ranks.kill(*[rank for rank in range(WORLD) if ranks.processes[rank].pid == place.stopped] or [1])
    else:
        ranks.kill()


def must_be_committed(point: str, victim: str) -> bool:
    """Whether the step that was being saved has to be there in the end: all had sealed it, or its ranks go on."""
    return point not in ("before stage", "mid stage", "staged") or victim in ("daemon", "embedded daemon")


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        pytest.param(
            point,
            victim,
            marks=() if (point, victim) in IN_MAKE_TEST else pytest.mark.crash_slow,
            id=f"{point}-{victim}".replace(" ", "-"),
        )
        for point in (*IN_A_RANK, *IN_THE_DAEMON)
        for victim in VICTIMS
    ],
)
def test_killed_while_a_step_is_saved(point: str, victim: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1 and 2 are committed, 3 is on its way: somebody dies at the point, and nothing that was promised is lost."""
    ledger.tried(LANE)
    stop_at(point, place, monkeypatch)
    monkeypatch.setenv("HOLDFAST_KEEP", str(KEEP))
    beside = "embedded" in victim
    daemon = None if beside else RunningDaemon(place.root)
    ranks = Ranks(place, daemon, "1,2,3!")
    ranks.wait_for("committed 2")
    (place.marks / "armed").touch()
    ranks.go()
    wait_until(lambda: place.stopped is not None)
    kill(victim, place, ranks, daemon)
    (place.marks / "go").touch()
    if victim == "daemon":
        daemon = RunningDaemon(place.root)
    either = point == "sealed" and victim in ("one rank", "trainer")  # the other rank may have sealed by then, or not
    if must_be_committed(point, victim) and not either:
        wait_until(lambda: 3 in committed_steps(place.root, RUN))
    ranks.end()
    resume(place, daemon, must_be_committed(point, victim), either)
    ledger.survived(LANE)


def resume(place: Place, daemon: RunningDaemon | None, third: bool, either: bool) -> None:
    """A new launch restores the newest step bit by bit, saves, and nothing else is left."""
    after = Ranks(place, daemon, "9")
    wait_until(lambda: all(said for said in after.said), 60)
    told = {said[0] for said in after.said}
    newest = (3, 2) if either else (3,) if third else (2,)
    assert told in [{f"restored {step}"} for step in newest], after.said
    after.wait_for("committed 9")
    after.end()
    stop(place, daemon)
    visible = committed_steps(place.root, RUN)
    # One that was not verified before its daemon died takes nobody's place: then older ones stay beside these two.
    assert visible[:2] == [9, int(told.pop().split()[1])]
    assert is_empty(place.root, naming.STAGING) and is_empty(place.root, naming.TRASH)
    check_sound(place.root, sorted(visible))


def stop(place: Place, daemon: RunningDaemon | None) -> None:
    """Let the daemon verify what it committed, and end."""
    if daemon is not None:
        assert daemon.stop() == 0
        return
    os.kill(embedded_pid(place), signal.SIGTERM)
    wait_until(lambda: processes(place.marks.parent, b"\0holdfast_service\0") == [])


@pytest.mark.crash_slow
@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_while_a_step_is_restored(victim: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody dies while ranks read: who goes on gets every byte right, and the next launch does."""
    ledger.tried(LANE)
    stop_at("mid restore", place, monkeypatch)
    beside = "embedded" in victim
    daemon = None if beside else RunningDaemon(place.root)
    first = Ranks(place, daemon, "1,2,3")
    first.wait_for("committed 3")
    first.end()
    (place.marks / "armed").touch()
    ranks = Ranks(place, daemon, "4!")
    wait_until(lambda: place.stopped is not None)
    kill(victim, place, ranks, daemon)
    (place.marks / "go").touch()
    if victim == "daemon":
        daemon = RunningDaemon(place.root)
    for said, process in zip(ranks.said, ranks.processes, strict=True):
        wait_until(lambda said=said, process=process: bool(said) or process.poll() is not None)
        assert process.poll() is not None or said == ["restored 3"]
    ranks.end()
    after = Ranks(place, daemon, "9")
    after.wait_for("restored 3")
    after.wait_for("committed 9")
    after.end()
    stop(place, daemon)
    check_sound(place.root, [1, 2, 3, 9])
    ledger.survived(LANE)


@pytest.mark.parametrize(
    ("point", "status"),
    [("mid export", 3), pytest.param("before COMMIT of the export", 5, marks=pytest.mark.crash_slow)],
)
def test_a_copy_that_is_killed_is_no_checkpoint(
    point: str, status: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`holdfast restore` dies: what it left is refused by name, the checkpoint and a new copy are whole."""
    from tests.checkpoints import build_root

    ledger.tried(LANE)
    built = build_root(place.root, {"tiny": (5,)})["tiny", 5]
    stop_at(point, place, monkeypatch)
    (place.marks / "armed").touch()
    outs = [place.marks / "first", place.marks / "second"]
    command = [*HOLDFAST, "restore", "tiny@5", "--root", str(place.root), "--out"]
    copying = subprocess.Popen([*command, str(outs[0])], stdout=subprocess.DEVNULL)
    wait_until(lambda: place.stopped == copying.pid)
    copying.kill()
    copying.wait()
    verify = [*HOLDFAST, "verify"]
    refused = subprocess.run([*verify, str(outs[0])], capture_output=True, text=True, check=False)
    assert refused.returncode == status and naming.COMMIT in refused.stdout + refused.stderr, refused
    subprocess.run([*command, str(outs[1])], check=True, stdout=subprocess.DEVNULL)
    for directory in (outs[1], built.path):
        subprocess.run([*verify, str(directory)], check=True, stdout=subprocess.DEVNULL)
    ledger.survived(LANE)


def test_every_point_is_in_the_product() -> None:
    """What the points wrap is there: a function that was renamed would be waited for in vain."""
    spec = importlib.util.spec_from_file_location("stops", STOPS / "sitecustomize.py")
    assert spec is not None and spec.loader is not None
    stops = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stops)
    for name, point in stops.POINTS.items():
        found = importlib.import_module(point.module)
        for part in point.function.split("."):
            found = getattr(found, part, None)
        assert callable(found), name

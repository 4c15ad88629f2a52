"""Killed at named points: saves, restores, jobs and averages by the points and the victims, in real processes (bar 1).

The process that comes to the point waits there, the victim is killed, the others go on, and the next daemon begins. What
must hold then is the scene's: what was announced is there and whole, what every rank had sealed is committed, a new launch
restores it bit by bit and saves; every job has ended, the stream has told every event once and in order over all starts, no
row of the catalog contradicts the directories; not one bit of an average is another one.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_formats.rest.operations import Job
from tests.checkpoints import build_root
from tests.crash import ledger
from tests.crash.launches import RUN, WORLD, Ranks, check_sound, is_empty, processes
from tests.crash.points import STOPS, Place, place, stop_at
from tests.crash.test_averages import POINTS, Trainers, check
from tests.crash.test_service_deaths import STEPS, Service, Watcher, check_rows, check_told, ended, submitted
from tests.daemons import RunningDaemon, wait_until

__all__ = ["place"]
SIZE = 300_007
KEEP = 2
HOLDFAST = (sys.executable, "-c", "from holdfast.cli import main; main()")
VICTIMS = ("trainer", "one rank", "daemon", "embedded daemon")
IN_A_RANK = ("before stage", "mid stage", "staged", "sealed")
IN_A_SAVE = ("mid write", "before manifest", "before COMMIT", "before rename", "after rename", "before the catalog")
IN_A_JOB = ("job claimed", "mid job", "before the job's end", "after the job's end", "before an event", "after an event")


class Scene(Protocol):
    """Processes that have begun an act, one of which dies in it."""

    def act(self) -> None:
        """Go on, to the point."""

    def kill(self) -> None:
        """End the victim as a power cut would, while a process waits at the point."""

    def check(self) -> None:
        """Start the next daemon where one has died; what must hold does."""


class Launch:
    """Two ranks, their daemon, and the one of them that dies."""

    def __init__(self, place: Place, point: str, victim: str, steps: str) -> None:
        self.place, self.point, self.victim = place, point, victim
        self.daemon = None if "embedded" in victim else RunningDaemon(place.root)
        self.ranks = self.launch(steps)

    def launch(self, steps: str) -> Ranks:
        return Ranks(None if self.daemon is None else self.daemon.socket, steps, SIZE, self.place.root)

    def kill(self) -> None:
        if self.victim == "daemon":
            assert self.daemon is not None
            self.daemon.kill()
        elif self.victim == "embedded daemon":
            os.kill(json.loads((self.place.root / naming.DAEMON_FILE).read_bytes())["pid"], signal.SIGKILL)
        elif self.victim == "one rank":  # the one at the point, if it is a rank
            at = [rank for rank in range(WORLD) if self.ranks.processes[rank].pid == self.place.stopped]
            self.ranks.kill(*at or [1])
        else:
            self.ranks.kill()

    def serve_again(self) -> None:
        if self.victim == "daemon":
            self.daemon = RunningDaemon(self.place.root)

    def stop(self) -> None:
        """Let the daemon verify what it committed, and end."""
        if self.daemon is not None:
            assert self.daemon.stop() == 0
            return
        os.kill(json.loads((self.place.root / naming.DAEMON_FILE).read_bytes())["pid"], signal.SIGTERM)
        wait_until(lambda: processes(self.place.marks.parent, b"\0holdfast_service\0") == [])


class Saving(Launch):
    """Steps 1 and 2 are committed, 3 is on its way: nothing that was promised is lost."""

    def __init__(self, place: Place, point: str, victim: str) -> None:
        super().__init__(place, point, victim, "1,2,3!")
        self.ranks.wait_for("committed 2")

    def act(self) -> None:
        self.ranks.go()

    def check(self) -> None:
        """A new launch restores the newest step bit by bit, saves, and nothing else is left."""
        self.serve_again()
        third = self.point not in ("before stage", "mid stage", "staged") or "daemon" in self.victim
        either = self.point == "sealed" and self.victim in ("one rank", "trainer")  # the other rank may have sealed, or not
        if third and not either:
            wait_until(lambda: 3 in committed_steps(self.place.root, RUN))
        self.ranks.end()
        after = self.launch("9")
        wait_until(lambda: all(after.said))
        told = {said[0] for said in after.said}
        newest = (3, 2) if either else (3,) if third else (2,)
        assert told in [{f"restored {step}"} for step in newest], after.said
        after.wait_for("committed 9")
        after.end()
        self.stop()
        visible = committed_steps(self.place.root, RUN)
        # A checkpoint that its daemon did not verify before it died replaces none: older ones stay beside these two.
        assert visible[:2] == [9, int(told.pop().split()[1])]
        assert is_empty(self.place.root, naming.STAGING) and is_empty(self.place.root, naming.TRASH)
        check_sound(self.place.root, visible, SIZE)


class Restoring(Launch):
    """Ranks read: those that go on get every byte right, and the next launch does."""

    def __init__(self, place: Place, point: str, victim: str) -> None:
        super().__init__(place, point, victim, "1,2,3")
        self.ranks.wait_for("committed 3")
        self.ranks.end()

    def act(self) -> None:
        self.ranks = self.launch("4!")

    def check(self) -> None:
        self.serve_again()
        for said, process in zip(self.ranks.said, self.ranks.processes, strict=True):
            wait_until(lambda said=said, process=process: bool(said) or process.poll() is not None)
            assert process.poll() is not None or said == ["restored 3"]
        self.ranks.end()
        after = self.launch("9")
        after.wait_for("restored 3")
        after.wait_for("committed 9")
        after.end()
        self.stop()
        check_sound(self.place.root, [1, 2, 3, 9], SIZE)


class Working:
    """Jobs are running, a step is being saved and a stream is open when the service dies; all of them go on."""

    def __init__(self, place: Place, point: str, victim: str) -> None:
        self.place = place
        build_root(place.root, {"tiny": STEPS})
        self.service = Service(place)
        self.watcher = Watcher(self.service.url)
        self.ranks = Ranks(self.service.daemon.socket, "1,2!", SIZE, place.root)
        self.ranks.wait_for("committed 1")
        self.api, self.jobs = Api(self.service.url), list[Job]()

    def act(self) -> None:
        self.submitting = threading.Thread(target=lambda: self.jobs.extend(submitted(self.api)))
        self.submitting.start()
        self.ranks.go()

    def kill(self) -> None:
        time.sleep(0.1)
        self.service.daemon.kill()

    def check(self) -> None:
        self.service.serve_again()
        self.submitting.join(180)
        with self.api as api:
            assert [ended(api, job).state for job in self.jobs] == ["done"] * len(STEPS)
            wait_until(lambda: 2 in committed_steps(self.place.root, RUN))
            self.ranks.wait_for("committed 2")
            self.ranks.end()
            wait_until(lambda: all(made.verified for made in api.checkpoints("tiny")))
            wait_until(lambda: all(made.ended for made in api.rounds(RUN)))
            check_rows(self.place.root, api)
            check_told(self.service, self.watcher)
        assert self.service.daemon.stop() == 0
        check_sound(self.place.root, [1, 2], SIZE)


class Averaging:
    """The daemon that keeps an average dies: the next one continues with the same chunk, and every bit is the same."""

    def __init__(self, place: Place, point: str, victim: str) -> None:
        self.place, self.daemon = place, RunningDaemon(place.root)
        self.trainers = Trainers(self.daemon, int(victim[-1]), 9, "6,9")
        self.trainers.hear("folded 4")

    def act(self) -> None:
        """It goes on by itself."""

    def kill(self) -> None:
        self.daemon.kill()

    def check(self) -> None:
        self.daemon = RunningDaemon(self.place.root)
        self.trainers.end()
        check(self.place.root, 6)
        check(self.place.root, 9)
        assert self.daemon.stop() == 0


class Act(NamedTuple):
    """A row of the table: its scene, the points, the victims, and the pairs of both that `make test` tries."""

    lane: str
    scene: Callable[[Place, str, str], Scene]
    points: tuple[str, ...]
    victims: tuple[str, ...]
    in_make_test: tuple[tuple[str, str], ...] = ()
    keep: int | None = None


TABLE = (
    Act(
        *("save", Saving, (*IN_A_RANK, *IN_A_SAVE, "mid rotation"), VICTIMS),
        (("before COMMIT", "daemon"), ("mid stage", "one rank")),
        KEEP,
    ),
    Act("restore", Restoring, ("mid restore",), VICTIMS),
    Act(
        *("service", Working, (*IN_A_JOB, "before the catalog", "a round has ended"), ("daemon",)),
        (("mid job", "daemon"), ("before the catalog", "daemon")),
    ),
    Act(
        *("average", Averaging, POINTS, ("daemon of 1", "daemon of 2")),
        tuple((at, "daemon of 2") for at in ("chunk copied, not noted", "recorded, not freed", "average in the slot")),
    ),
)


@pytest.mark.parametrize(
    ("act", "point", "victim"),
    [
        pytest.param(
            *(act, point, victim),
            marks=() if (point, victim) in act.in_make_test else pytest.mark.crash_slow,
            id=f"{act.lane}-{point}-{victim}".replace(" ", "-"),
        )
        for act in TABLE
        for point in act.points
        for victim in act.victims
    ],
)
def test_killed_at_a_point(act: Act, point: str, victim: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the scene says holds."""
    lane = f"killed at named points: {act.lane}"
    ledger.tried(lane)
    if act.keep is not None:
        monkeypatch.setenv("HOLDFAST_KEEP", str(act.keep))
    stop_at(point, place, monkeypatch)
    scene = act.scene(place, point, victim)
    (place.marks / "armed").touch()
    scene.act()
    wait_until(lambda: place.stopped is not None)
    scene.kill()
    (place.marks / "armed").unlink()
    (place.marks / "go").touch()
    scene.check()
    ledger.survived(lane)


@pytest.mark.parametrize(
    ("point", "status"),
    [("mid export", 3), pytest.param("before COMMIT of the export", 5, marks=pytest.mark.crash_slow)],
)
def test_a_copy_that_is_killed_is_no_checkpoint(
    point: str, status: int, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`holdfast restore` dies: what it left is refused by name, the checkpoint and a new copy are whole."""
    lane = "killed at named points: copy"
    ledger.tried(lane)
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
    ledger.survived(lane)


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

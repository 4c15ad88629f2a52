"""An hour of random deaths with everything at once: ranks and daemons killed, rewinds, saves of groups, NaNs, retention,
roots copied while they are in use, and a catalog that goes away. Nothing is lost, nothing wrong handed over, no save waits.

`--attack-s 3600` makes it an hour. How long `save()` took is printed, and not judged: machines are busy at times.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from tests.crash.launches import holders, processes
from tests.daemons import RunningDaemon, runtime_directory, wait_until

RUN, WORLD = "r", 2
DEFAULT_S = 60.0
LAUNCH_S_MAX = 120.0
LIFE_S = (1.0, 8.0)
SAVE_BAR_S = 0.05

pytestmark = pytest.mark.attack


class At(NamedTuple):
    """A state: the step, and the launch whose training came to it; (0, 0) is the beginning."""

    step: int
    launch: int


class Launch:
    """The processes of a launch, and what each has said."""

    def __init__(self, root: Path, number: int, plan: dict) -> None:
        self.number, self.said = number, [[] for _ in range(WORLD)]
        self._readers, self.processes = [], []
        for rank in range(WORLD):
            command = [sys.executable, "-m", "tests.attack.mayhem_rank", str(root), RUN, str(number), json.dumps(plan)]
            about = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(WORLD),
                "HOLDFAST_LAUNCH": f"launch-{number}",
            }
            log = (root.parent / f"launch-{number}.{rank}.log").open("w")
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=about)
            log.close()
            self._readers.append(threading.Thread(target=self._read, args=(rank, process), daemon=True))
            self._readers[-1].start()
            self.processes.append(process)

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.said[rank].append(line.strip().split(maxsplit=3))

    def all_said(self, word: str) -> list[list[str]]:
        return [line for said in list(self.said) for line in list(said) if line[0] == word]

    @property
    def over(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def end(self, *victims: int) -> None:
        """Kill the victims, and see that nobody is left after a while."""
        for rank in victims:
            self.processes[rank].kill()
        limit = time.monotonic() + LAUNCH_S_MAX
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 0.1) if not victims else 1.0)
            process.kill()
            process.wait()
        for reader, process in zip(self._readers, self.processes, strict=True):
            reader.join()
            assert process.stdout is not None
            process.stdout.close()


class Oracle:
    """What must be true of the next restore, from what ranks have been told."""

    def __init__(self) -> None:
        self.newest = At(0, 0)  # of what was announced as committed and whole
        self.rewound: At | None = None  # where a launch went back to, and announced nothing since
        self.tried: dict[int, set[int]] = {0: {0}}  # launch -> whole steps that it handed over

    def allowed(self, at: At, healthy: bool) -> bool:
        """Whether a restore that names no step may come to this state."""
        if at.step not in self.tried.get(at.launch, set()):
            return False
        if at.launch > self.newest.launch or (at.launch == self.newest.launch and at.step >= self.newest.step):
            return True
        return healthy or at == self.rewound

    def restored(self, at: At, back: bool) -> None:
        if back:
            self.rewound = at

    def announced(self, at: At) -> None:
        if (at.launch, at.step) > (self.newest.launch, self.newest.step):
            self.newest, self.rewound = at, None


class Mayhem:
    """The root, its daemon of the moment, and launch after launch."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.root, self._chance = directory / "root", chance
        self.daemon = RunningDaemon(self.root)
        self.oracle = Oracle()
        self.stalls: list[float] = []
        self.counts: dict[str, int] = {}
        self.slow: dict[str, list[float]] = {}  # by what the rank waited for: how long the whole save() took
        self._number = 0

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def launch(self) -> None:
        """One launch: it restores, saves, and meets whatever comes."""
        chance = self._chance
        self._number += 1
        plan = {
            "restore": self._where(),
            "saves": chance.randrange(1, 60),
            "partial": chance.choice((0, 2, 3)),
            "nan": chance.choice((None, None, chance.randrange(1, 20))),
            "pause_s": chance.choice((0.01, 0.05, 0.2)),
            "keep": chance.choice((1, 2, 3)),
        }
        launch = Launch(self.root, self._number, plan)
        wait_until(lambda: launch.over or len(launch.all_said("restored")) == WORLD, LAUNCH_S_MAX)
        self._heard_restore(launch, plan)
        for act in chance.sample((self._kill_daemon, self._lock_catalog, self._copy, self._nothing, self._nothing), 2):
            if not launch.over:
                time.sleep(chance.uniform(0, LIFE_S[0]))
                act()
        victims = chance.choice(((), (), (0,), (1,), (0, 1)))
        if victims:
            time.sleep(chance.uniform(0, LIFE_S[1]))
            self.count("launches killed")
        launch.end(*victims)
        self._heard(launch)

    def _where(self) -> dict:
        """Which state a launch asks for."""
        steps = whole_steps(self.root)
        kind = self._chance.choice(("plain", "plain", "plain", "step", "healthy"))
        if kind == "step" and steps:
            self.count("rewinds by step")
            return {"step": self._chance.choice(steps)}
        if kind == "healthy" and steps:
            self.count("rewinds to what is healthy")
            return {"healthy": True}
        return {}

    def _heard_restore(self, launch: Launch, plan: dict) -> None:
        found = launch.all_said("restored")
        assert not launch.all_said("wrong"), launch.all_said("wrong")
        refused = launch.all_said("refused")
        if not found:
            # A step that was there when it was chosen may have been rotated out since.
            allowed = {"no-such-checkpoint", "not-committed", "deadline-exceeded", "unhealthy"} if plan["restore"] else set()
            assert refused and {line[1] for line in refused} <= allowed, (plan, refused, self._logs(launch))
            return
        states = {At(int(line[1]), int(line[2])) for line in found}
        assert len(states) == 1, f"ranks went on from different states: {states}"
        at, asked = states.pop(), plan["restore"]
        if "step" in asked:
            assert at.step == asked["step"]
        else:
            assert self.oracle.allowed(at, "healthy" in asked), (at, self.oracle.newest, self.oracle.rewound, plan)
        if "healthy" in asked:
            assert not any(line[3] == "1" for line in found), "a state with a NaN was called healthy"
        self.oracle.restored(at, bool(asked))
        self.oracle.tried[launch.number] = set()

    def _heard(self, launch: Launch) -> None:
        assert not launch.all_said("wrong"), launch.all_said("wrong")
        whole = {int(line[1]) for line in launch.all_said("saved") if line[3] == "full"}
        self.stalls += [float(line[2]) for line in launch.all_said("saved")]
        for line in launch.all_said("slow"):
            self.slow.setdefault(line[3], []).append(float(line[2]))
        if launch.number in self.oracle.tried:
            self.oracle.tried[launch.number] |= whole
        for line in launch.all_said("committed"):
            if int(line[1]) in whole:
                self.oracle.announced(At(int(line[1]), launch.number))
        self.count("launches")
        for line in launch.all_said("refused"):
            self.count(f"refused {line[1]}")
            assert line[1] not in ("already-committed", "torn-snapshot", "replicas-differ", "state-mismatch"), line
        for line in launch.all_said("failed"):
            self.count(f"failed {line[2]}")
            assert line[2] not in ("already-committed", "torn-snapshot", "replicas-differ", "storage-failed"), line
        errors = [text for text in self._logs(launch) if "Traceback" in text]
        assert not errors, errors[0][-3000:]

    def _logs(self, launch: Launch) -> list[str]:
        return [(self.root.parent / f"launch-{launch.number}.{rank}.log").read_text() for rank in range(WORLD)]

    def _nothing(self) -> None:
        pass

    def _kill_daemon(self) -> None:
        self.count("daemons killed")
        self.daemon.kill()
        time.sleep(self._chance.uniform(0, 1.0))
        self.daemon = RunningDaemon(self.root)

    def _lock_catalog(self) -> None:
        """Somebody else writes to the catalog for a while."""
        self.count("catalogs away")
        with suppress(sqlite3.OperationalError):  # it is busy itself
            other = sqlite3.connect(self.root / naming.CATALOG, timeout=1, isolation_level=None)
            try:
                other.execute("BEGIN IMMEDIATE")
                time.sleep(self._chance.uniform(0.2, 6.0))
                other.execute("ROLLBACK")
            finally:
                other.close()

    def _copy(self) -> None:
        """A copy of the root is trained on for a moment: nothing of it comes to the original."""
        self.count("copied roots")
        copied = self.root.parent / f"copy-{self._number}" / "root"
        copied.parent.mkdir()
        subprocess.run(["cp", "-r", str(self.root), str(copied)], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(copied / RUN / naming.STAGING, ignore_errors=True)
        steps = whole_steps(copied)
        mark = 1_000_000 + self._number  # of a launch that no other has
        plan = {"restore": {}, "saves": 1, "partial": 0, "nan": None, "pause_s": 0.0, "keep": 3}
        launch = Launch(copied, mark, plan)
        launch.end()
        found = launch.all_said("restored")
        if steps and found:
            assert int(found[0][1]) in committed_steps(copied, RUN) or int(found[0][1]) >= max(steps)
        assert not launch.all_said("wrong"), launch.all_said("wrong")
        assert mark not in launches_in(self.root), "what was saved into the copy came into the original"
        for pid in processes(copied.parent, b"\0holdfast_service\0"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(copied.parent, ignore_errors=True)


def tag(root: Path, step: int) -> dict | None:
    """Which launch a checkpoint on disk is of; None where it cannot be read any more, or holds the model alone."""
    try:
        with open_checkpoint(root, None, RUN, step) as reader:
            if not {"model", "optim", "extra"} <= set(reader.manifest.groups):
                return None
            found = json.loads(reader.state)
    except CheckpointError:
        return None
    text = json.dumps(found)
    return {"launch": int(text.split('"launch": ')[1].split(",")[0].split("}")[0])} if '"launch": ' in text else {}


def whole_steps(root: Path) -> list[int]:
    """Steps from which training can go on, as the directory has them."""
    return [step for step in committed_steps(root, RUN) if tag(root, step) is not None] if (root / RUN).is_dir() else []


def launches_in(root: Path) -> set[int]:
    found = (tag(root, step) for step in committed_steps(root, RUN))
    return {made["launch"] for made in found if made}


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path, for sockets; afterwards no process is left that began here."""
    with runtime_directory() as made:
        yield made
        for pid in processes(made, b"\0holdfast_service\0"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in holders(made):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_everything_at_once(directory: Path, request: pytest.FixtureRequest) -> None:
    """Whatever dies, every restore is bit-exact, agrees among ranks, and is nothing older than what was announced."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    mayhem = Mayhem(directory, random.Random(seed))
    limit = time.monotonic() + (request.config.getoption("--attack-s") or DEFAULT_S)
    final = {"restore": {}, "saves": 1, "partial": 0, "nan": None, "pause_s": 0.0, "keep": 3}
    try:
        while time.monotonic() < limit:
            mayhem.launch()
        last = Launch(mayhem.root, 10_000_000, final)
        last.end()
    finally:
        mayhem.daemon.kill()
    stalls = sorted(mayhem.stalls)
    assert len(stalls) > 10
    over = sum(stall > SAVE_BAR_S for stall in stalls)
    middle, late = statistics.median(stalls) * 1e3, stalls[int(len(stalls) * 0.99)] * 1e3
    print(f"{len(stalls)} saves: save() {middle:.1f} ms, p99 {late:.1f},")
    print(f"longest {stalls[-1] * 1e3:.0f} ms, {over} over {SAVE_BAR_S * 1e3:.0f} ms; {mayhem.counts}")
    for where, seconds in sorted(mayhem.slow.items(), key=lambda item: -max(item[1])):
        print(f"{len(seconds)} waited in {where}: {statistics.median(seconds):.3f} s, longest {max(seconds):.3f}")
    assert len(last.all_said("restored")) == WORLD and len(last.all_said("done")) == WORLD, last.said

"""Two thousand saves with rotation while ranks and daemons are killed at random: nothing is lost, and nothing leaks.

`--soak-s 60` makes it a minute long, however many saves that is.
"""

from __future__ import annotations

import os
import random
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from holdfast.read.directory_root import committed_steps
from holdfast_formats import naming
from tests.crash import ledger
from tests.crash.launches import RUN, WORLD, Ranks, check_sound, holders, is_empty, processes
from tests.crash.points import Place
from tests.daemons import RunningDaemon, wait_until

LANE = "soak with random kills"
SAVES, SIZE = 2000, 300_007
SOAK_S_MAX = 540.0
KEEP = 3
STEPS_A_LAUNCH = 400
LIFE_S = 1.5  # how long a launch lives at most
DAEMON_DEATHS_FROM = 0.5  # the first half of the saves is one daemon's, so that its leaks can be seen
RSS_GROWTH_BYTES_MAX = 40 * 2**20
DESCRIPTORS_GROWTH_MAX = 12
SEGMENTS_MAX = 3 * WORLD  # a launch's own, its predecessor's that is held, and one on its way out

pytestmark = pytest.mark.crash_slow


class Use(NamedTuple):
    """What a process takes of the machine."""

    rss_bytes: int
    descriptors: int
    threads: int


def use(pid: int) -> Use:
    status = Path(f"/proc/{pid}/status").read_text()
    rss, threads = (int(re.search(rf"^{key}:\s+(\d+)", status, re.M)[1]) for key in ("RssAnon", "Threads"))  # type: ignore[index]
    return Use(rss * 1024, len(os.listdir(f"/proc/{pid}/fd")), threads)


def disk_bytes(root: Path) -> int:
    """What the files under a root take; some may go while we look."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(Path(directory, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


@pytest.fixture
def place() -> Iterator[Place]:
    """A root in memory where there is one: it is the number of saves that counts here."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="hf-", dir=shared if shared.is_dir() else None) as directory:
        yield Place(Path(directory) / "root", Path(directory))


class Soak:
    """The daemon of the moment, launch after launch, and what they have committed so far."""

    def __init__(self, place: Place, chance: random.Random) -> None:
        self._place, self._chance = place, chance
        self.daemon = self._start()
        self.kills = self.daemon_kills = 0
        self._next = 1

    def _start(self) -> RunningDaemon:
        return RunningDaemon(self._place.root, "--keep", str(KEEP))

    @property
    def committed(self) -> list[int]:
        """Every step that a daemon says it committed, in the order of its saying so."""
        return [int(step) for step in re.findall(r"r@(\d+) attempt \d+ committed", self.daemon.log.read_text())]

    def launch(self, daemon_dies: bool) -> None:
        """A launch that saves until somebody dies at a random moment; the next one goes on from the newest step."""
        steps = ",".join(str(self._next + i) for i in range(STEPS_A_LAUNCH))
        ranks = Ranks(self.daemon.socket, steps, SIZE, self._place.root)
        newest = max([0, *committed_steps(self._place.root, RUN)])
        wait_until(lambda: all(ranks.said))
        time.sleep(self._chance.uniform(0.2, LIFE_S))
        if daemon_dies:
            ledger.tried(LANE)
            self.daemon.kill()
            self.daemon = self._start()
            self.daemon_kills += 1
            time.sleep(self._chance.uniform(0, 1))
        victims = self._chance.choice([(0,), (1,), (0, 1)])
        ledger.tried(LANE)
        ranks.kill(*victims)
        self.kills += 1
        time.sleep(self._chance.uniform(0, 0.1))
        ranks.end()
        (restored,) = {said[0] for said in ranks.said}  # what the launch before had sealed may have come in between
        assert restored.startswith("restored ") and int(restored.split()[1]) >= newest, (newest, restored)
        assert not [line for said in ranks.said for line in said if line.split()[0] in ("wrong", "lost")]
        wait_until(lambda: is_empty(self._place.root, naming.STAGING))
        told = {int(line.split()[1]) for said in ranks.said for line in said if line.startswith("committed")}
        visible = committed_steps(self._place.root, RUN)
        assert max(visible) >= max([0, *told]), "an announced step is gone"
        self._next = max(visible) + 1
        ledger.survived(LANE, 1 + daemon_dies)


def test_saves_and_rotations_with_random_kills(place: Place, request: pytest.FixtureRequest) -> None:
    """All that was announced is there until it is rotated out; memory, descriptors, processes and disk stay bounded."""
    asked = request.config.getoption("--soak-s")
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    soak = Soak(place, chance)
    limit = time.monotonic() + (asked or SOAK_S_MAX)
    first: Use | None = None
    began = time.monotonic()
    while (saves := len(soak.committed)) < SAVES and time.monotonic() < limit:
        late = saves > SAVES * DAEMON_DEATHS_FROM or time.monotonic() - began > (limit - began) * DAEMON_DEATHS_FROM
        if not late:
            soak.launch(daemon_dies=False)
            first = first or use(soak.daemon.process.pid)
            last = use(soak.daemon.process.pid)
            continue
        soak.launch(daemon_dies=chance.random() < 0.5)
        assert len(holders(place.marks)) <= 1
    assert first is not None and soak.kills
    print(f"{saves} saves, {soak.kills} launches and {soak.daemon_kills} daemons killed; {first} -> {last}")
    assert asked or saves >= SAVES, f"only {saves} saves in {SOAK_S_MAX:.0f} s"
    check_bounded(first, last)
    check_end(place, soak)


def check_bounded(first: Use, last: Use) -> None:
    """One daemon over half of the saves takes no more in the end than after its first launch, but for what it caches."""
    assert last.rss_bytes - first.rss_bytes < RSS_GROWTH_BYTES_MAX, (first, last)
    assert last.descriptors - first.descriptors < DESCRIPTORS_GROWTH_MAX, (first, last)
    assert last.threads - first.threads < WORLD * 2, (first, last)


def check_end(place: Place, soak: Soak) -> None:
    """After the last one nothing is left but the newest checkpoints; after the daemon's end, no process."""
    (holder,) = holders(place.marks) or [None]
    if holder is not None:
        kept = [link for link in Path(f"/proc/{holder}/fd").iterdir() if "memfd:" in str(os.readlink(link))]
        assert len(kept) <= SEGMENTS_MAX, f"{len(kept)} segments are kept"
    assert soak.daemon.stop() == 0
    wait_until(lambda: holders(place.marks) == [])
    assert processes(place.marks, b"\0holdfast_service\0") == []
    visible = sorted(committed_steps(place.root, RUN))
    assert KEEP <= len(visible) <= KEEP + soak.daemon_kills  # one that was never verified replaces none
    assert is_empty(place.root, naming.STAGING) and is_empty(place.root, naming.TRASH)
    check_sound(place.root, visible, SIZE)
    assert disk_bytes(place.root) < (len(visible) + 1) * WORLD * SIZE * 2 + 32 * 2**20

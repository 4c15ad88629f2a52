"""Two nodes reach one root by mounts that remember for 30 s which names there are, as clients of NFS do.

A name that a node has looked for in vain stays absent for it, also in lists, although the other node has made it meanwhile;
one that the other node has renamed or removed can still be found. Nothing may depend on it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.posix import PosixTier
from tests.cluster.test_joint_rounds import how_it_ended
from tests.daemons import wait_until
from tests.databases import Postgres
from tests.regressions.joint_worlds import ranks
from tests.regressions.test_many_daemons import Daemon, steps

SECONDS = 30
PYTHON = "/usr/bin/python3"
PROGRAM = Path(__file__).with_name("cached_mount.py")
MOUNT_TIMEOUT_S = 60.0


def _without() -> str:
    """What is missing, so that nothing can be mounted here; empty if nothing is."""
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse"
    found = subprocess.run([PYTHON, "-c", "import pyfuse3, trio"], capture_output=True, check=False)
    return "" if found.returncode == 0 else "Debian's packages python3-pyfuse3 and fuse3 are not installed"


WITHOUT = _without()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.skipif(bool(WITHOUT), reason=WITHOUT),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that a kill has ended
]


class MountedSite:
    """Nodes that each have a mount of their own of one directory; `root` is that directory itself."""

    def __init__(self, directory: Path, url: str) -> None:
        self.root, self.url, self._directory = directory / "shared", url, directory
        self.root.mkdir()
        self.daemons: list[Daemon] = []
        self._mounts: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *flags: str) -> Daemon:
        mount = self._directory / name
        if name not in self._mounts:
            mount.mkdir()
            self._mounts[name] = subprocess.Popen([PYTHON, PROGRAM, self.root, mount, str(SECONDS)])
            wait_until(lambda: mount.is_mount() or self._mounts[name].poll() is not None, MOUNT_TIMEOUT_S)
            assert mount.is_mount()
        made = Daemon(mount, name, self.url, *flags)
        self.daemons.append(made)
        return made

    def close(self) -> None:
        for daemon in self.daemons:
            if daemon.process.poll() is None:
                daemon.stop()
        for name, program in self._mounts.items():
            subprocess.run(["umount", "-l", self._directory / name], check=False)
            program.wait(MOUNT_TIMEOUT_S)


@pytest.fixture
def mounted(tmp_path: Path, postgres: Postgres) -> Iterator[MountedSite]:
    url = postgres.take()
    made = MountedSite(tmp_path, url)
    try:
        yield made
    finally:
        made.close()
        postgres.give_back(url)


def sound(site: MountedSite, run: str, expected: list[int]) -> None:
    """These steps stand, and are what their digests say."""
    assert steps(site.root, run) == expected
    for step in expected:
        verify(PosixTier(site.root), naming.checkpoint_path(run, step))


def test_saves_and_restores_of_two_nodes(mounted: MountedSite) -> None:
    """They save together; a launch whose ranks have changed places restores the newest step on both."""
    a, b = mounted.start("a"), mounted.start("b")
    with ranks("run", [a, b], "first") as world:
        for step in range(1, 5):
            for ticket in world.save(step):
                ticket.result()
        world.set(0)
        assert set(world.each(lambda rank, one: one.restore())) == {4}
        world.check(4)
    with ranks("run", [b, a], "second") as world:
        assert set(world.each(lambda rank, one: one.restore())) == {4}
        world.check(4)
        for ticket in world.save(5):
            ticket.result()
    sound(mounted, "run", [1, 2, 3, 4, 5])


def test_a_launch_that_moves(mounted: MountedSite) -> None:
    """A run of one node goes to the other and back, at once each time: it goes on from its newest step."""
    places = {name: mounted.start(name) for name in "ab"}
    for number in range(1, 7):
        with ranks("run", [places["ab"[number % 2]]], f"launch {number}") as world:
            began = time.monotonic()
            assert set(world.each(lambda rank, one: one.restore())) == {number - 1}
            print(f"launch {number} has restored after {time.monotonic() - began:.1f} s", flush=True)
            if number > 1:
                world.check(number - 1)
            for ticket in world.save(number):
                ticket.result()
    sound(mounted, "run", list(range(1, 7)))


def test_a_step_is_replaced_on_another_node(mounted: MountedSite) -> None:
    """A launch of the other node goes back, and saves the same steps again: they are replaced, and restore as they are."""
    a, b = mounted.start("a"), mounted.start("b")
    with ranks("run", [a, b], "first") as world:
        for step in (1, 2, 3):
            for ticket in world.save(step):
                ticket.result()
    with ranks("run", [b, a], "second") as world:
        assert set(world.each(lambda rank, one: one.restore(step=1))) == {1}
        for step in (2, 3):
            world.set(step + 100)
            for ticket in world.each(lambda rank, one: one.save(step, existing="replace", wait="durable")):  # noqa: B023
                ticket.result()
    with ranks("run", [a, b], "third") as world:
        assert set(world.each(lambda rank, one: one.restore())) == {3}
        world.check(103)
    sound(mounted, "run", [1, 2, 3])


def test_retention_of_what_the_other_node_saved(mounted: MountedSite) -> None:
    """The last two are kept, whichever node decides; and a step that was removed can be saved again."""
    a, b = mounted.start("a"), mounted.start("b")
    for number, places in enumerate(([a, b], [b, a], [b], [a])):
        with ranks("run", places, f"launch {number}", keep_last=2) as world:
            world.each(lambda rank, one: one.restore())
            for step in (2 * number + 1, 2 * number + 2):
                for ticket in world.save(step):
                    ticket.result()
    wait_until(lambda: steps(mounted.root, "run") == [7, 8])
    sound(mounted, "run", [7, 8])


def test_a_committer_is_killed_and_the_other_node_commits(mounted: MountedSite) -> None:
    """Whichever daemon is killed, at whatever moment: all ranks hear the same, and it is what stands."""
    places = {name: mounted.start(name) for name in "ab"}
    with ranks("run", [places["a"], places["b"]], "killed", slots=3) as world:
        expected = []
        for number in range(6):
            step = 2 * number + 1
            tickets = world.save(step, wait=None)
            time.sleep(0.15 * number)
            victim = "ab"[number % 2]
            places[victim].kill()
            places[victim] = mounted.start(victim)
            heard = {how_it_ended(ticket) for ticket in tickets}
            assert len(heard) == 1, (step, heard)
            assert (step in steps(mounted.root, "run")) == (heard == {"committed"}), (step, heard)
            for ticket in world.save(step + 1):
                ticket.result()
            expected += [step] * (heard == {"committed"}) + [step + 1]
    sound(mounted, "run", expected)

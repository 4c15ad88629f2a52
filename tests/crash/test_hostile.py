"""Hostile surroundings: a full, read-only or stalling disk, too little memory, too few descriptors, clocks that jump.

Each ends in a named error with a hint, costs nothing that was committed, and the next save works when the cause is gone.
A second daemon on a root or socket is `tests/daemon/test_server.py`'s, file systems without direct access are
`tests/storage/test_posix.py`'s.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from holdfast.link.unix_socket import SocketLink
from holdfast.read.directory_root import committed_steps
from holdfast.rest.api import Api
from holdfast.stage.slots import Slots
from holdfast_formats.errors import ArenaFull, CheckpointError, LimitExceeded, NoSpace, StorageFailed
from holdfast_formats.region import Box
from holdfast_formats.staging import slot_table, wire
from holdfast_formats.staging.slot_table import SlotTable
from holdfast_formats.tensors import StagedFragment, TensorSpec
from holdfast_service.control import launch_registry, publishing
from holdfast_service.storage import PosixTier, posix
from tests.crash import ledger
from tests.crash.disks import attached, command, memory_disk
from tests.crash.launches import holders
from tests.daemon.saver_world import RUN, Rank, SaverWorld, refused
from tests.daemons import RunningDaemon, running, wait_until

LANE = "hostile surroundings"
STALL_S = 1.0
LONG_STALL_S = 30.0
NBYTES = 200_000


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    """Every test of this file is one fault, which survives if the test does."""
    ledger.tried(LANE)
    yield


@pytest.fixture
def place() -> Iterator[Path]:
    """A short path; root may mount below it."""
    with tempfile.TemporaryDirectory(prefix="hf-") as directory:
        yield Path(directory)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


@contextmanager
def saving(root: Path) -> Iterator[tuple[SaverWorld, Rank]]:
    """A saver on a directory, with step 1 committed."""
    world = SaverWorld(PosixTier(root))
    (rank,) = world.launch(1)
    rank.save(1)
    assert rank.wait(1).state == "committed"
    try:
        yield world, rank
    finally:
        world.close()


def check_refused(world: SaverWorld, rank: Rank, step: int, kind: type[CheckpointError], cause: str) -> None:
    """The step ends by name, with its cause and a hint; what was committed before is whole."""
    before = world.committed()
    rank.save(step)
    problem = rank.wait(step).problem
    assert problem is not None and problem["code"] == kind.code and problem["hint"], problem
    assert cause in problem["detail"]
    assert world.committed() == before


def check_saved(world: SaverWorld, rank: Rank, step: int) -> None:
    rank.save(step)
    assert rank.wait(step).state == "committed"
    assert world.committed()[-1] == step
    ledger.survived(LANE)


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk(place: Path, kind: str) -> None:
    """`no-space`; with room again the next save works. (On tmpfs this is a root without a disk, too.)"""
    with small_disk(place, kind) as disk, saving(disk / "root") as (world, rank):
        fill(disk / "filler")
        check_refused(world, rank, 2, NoSpace, "bytes of disk space, but only 0 are free")
        (disk / "filler").unlink()
        check_saved(world, rank, 3)
        assert world.tier.list(f"{RUN}/staging") == []


@contextmanager
def small_disk(place: Path, kind: str) -> Iterator[Path]:
    if kind == "tmpfs":
        with memory_disk(place / "disk", "2m") as disk:
            yield disk
        return
    (place / "disk").mkdir()
    with open(place / "image", "wb") as image:
        image.truncate(8 * 2**20)
    command("mkfs.ext4", "-q", "-F", place / "image")
    with attached(place / "image", place / "disk") as disk:
        yield disk


def fill(path: Path) -> None:
    """Take every block that is left, to the last byte."""
    with open(path, "wb", buffering=0) as file:
        for size in (2**16, 2**10, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC


@needs_root
def test_a_disk_that_becomes_read_only(place: Path) -> None:
    """`storage-failed`, with what the system says; writable again, the next save works."""
    with memory_disk(place / "disk", "8m") as disk, saving(disk / "root") as (world, rank):
        command("mount", "-o", "remount,ro", disk)
        check_refused(world, rank, 2, StorageFailed, os.strerror(errno.EROFS))
        command("mount", "-o", "remount,rw", disk)
        check_saved(world, rank, 3)


@pytest.mark.crash_slow
@needs_root
def test_an_ext4_that_gives_up(place: Path) -> None:
    """The kernel finds an ext4 damaged and lets nobody write: the daemon names it; mounted anew, it serves as before."""
    (place / "disk").mkdir()
    with open(place / "image", "wb") as image:
        image.truncate(64 * 2**20)
    command("mkfs.ext4", "-q", "-F", place / "image")
    with attached(place / "image", place / "disk"):
        daemon = RunningDaemon(place / "disk" / "root")
        trainer = Trainer(daemon)
        assert trainer.save(1) is None
        command("mount", "-o", "remount,abort", place / "disk")
        found = trainer.save(2)
        assert isinstance(found, StorageFailed) and found.hint, found
        assert committed_steps(daemon.root, RUN) == [1]
        trainer.close()
        daemon.kill()
        for pid in holders(place):  # its socket lies on this disk
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: holders(place) == [])
    with attached(place / "image", place / "disk"), running(place / "disk" / "root") as daemon:
        trainer = Trainer(daemon)
        assert trainer.save(3) is None
        assert committed_steps(daemon.root, RUN) == [3, 1]
        trainer.close()
    ledger.survived(LANE)


@pytest.mark.parametrize("stall_s", [STALL_S, pytest.param(LONG_STALL_S, marks=pytest.mark.crash_slow)])
def test_a_disk_that_stalls(place: Path, stall_s: float) -> None:
    """A save behind it waits in its slot, one more is refused by name at once; then all that was sealed is committed."""
    go_on = threading.Event()

    def stalled(descriptor: int) -> None:
        assert go_on.wait(stall_s + 60)
        os.fsync(descriptor)

    with saving(place / "root") as (world, rank), mock.patch.object(posix, "_fsync", stalled):
        rank.save(2)
        rank.save(3)
        assert isinstance(error := refused(rank.lease, 4), ArenaFull) and error.hint
        # Who waited for the disk would not have come here: it goes on when we say so.
        time.sleep(stall_s)
        assert world.committed() == [1]
        go_on.set()
        assert rank.wait(2).state == rank.wait(3).state == "committed"
        check_saved(world, rank, 5)
        assert world.committed() == [1, 2, 3, 5]


@pytest.mark.parametrize("jump", ["back", "ahead"])
def test_a_clock_that_jumps(place: Path, jump: str) -> None:
    """Steps are what counts, not the hour: the newest stays the newest, and the older one goes when it should."""
    hours = {"back": "1999-01-01T00:00:00.000Z", "ahead": "2099-01-01T00:00:00.000Z"}
    with saving(place / "root") as (world, rank):
        world.control.wishes.usual = None
        with (
            mock.patch.object(launch_registry, "utc_now", lambda: hours[jump]),
            mock.patch.object(publishing, "utc_now", lambda: hours[jump]),
            mock.patch("time.time", lambda: 0.0),
        ):
            check_saved(world, rank, 2)
            world.saver.expire()
            assert world.control.restores.choose(RUN, rank.attempt, 0, None, ("model",)) == 2
        check_saved(world, rank, 3)
        ledger.tried(LANE)  # two saves, one more than a test
        assert world.control.restores.choose(RUN, rank.attempt, 1, None, ("model",)) == 3
        assert world.committed() == [1, 2, 3]


class Trainer:
    """One rank in this process, over the daemon's socket."""

    def __init__(self, daemon: RunningDaemon, nbytes: int = NBYTES, run: str = RUN) -> None:
        self._heard = threading.Condition()
        self._outcomes: dict[int, wire.Outcome] = {}
        self._nbytes = nbytes
        self.link = SocketLink(daemon.socket, self._hear, lambda error: None, lambda: daemon.socket)
        hello = wire.Hello(id=self.link.next_id(), run=run, rank=0, world=1, launch=f"launch-{time.monotonic_ns()}")
        try:
            self._attempt = self.link.request(hello, wire.Welcome).attempt
            question = wire.Choose(id=self.link.next_id(), turn=0, groups=("model",), wait_s=30)
            self._restored = self.link.request(question, wire.Chosen).step
            self._slots = Slots(self.link, 2, nbytes, 65_536)
        except BaseException:
            self.link.close()
            raise

    def _hear(self, outcome: wire.Outcome) -> None:
        with self._heard:
            self._outcomes[outcome.step] = outcome
            self._heard.notify_all()

    def save(self, step: int) -> CheckpointError | None:
        """Save bytes that follow from the step; what it ended with."""
        from holdfast_formats.errors import from_problem

        spec = TensorSpec("model", "w", "U8", (self._nbytes,))
        held = (StagedFragment(spec, (Box((0,), (self._nbytes,)),), 0),)
        turn = 0 if self._restored is None else 1
        table = SlotTable(RUN, step, self._attempt, 0, 1, ("model",), held, {}, {}, restored=self._restored, turn=turn)
        try:
            slot = self._slots.lease(step, self._attempt, 30, intent=table.intent)
            np.frombuffer(slot.data, np.uint8)[: self._nbytes] = step
            slot.hand_over(slot.seal(slot_table.encode(table), self._nbytes))
        except CheckpointError as error:
            return error
        with self._heard:
            assert self._heard.wait_for(lambda: step in self._outcomes, 60)
            problem = self._outcomes[step].problem
        return from_problem(problem) if problem else None

    def close(self) -> None:
        self.link.close()


def limit(daemon: RunningDaemon, what: int, soft: int) -> None:
    """Set a soft limit of a daemon that runs."""
    _, hard = resource.prlimit(daemon.process.pid, what)
    resource.prlimit(daemon.process.pid, what, (soft, hard))


def test_too_few_descriptors(place: Path) -> None:
    """A daemon without one descriptor to spare refuses by name and stays; with some more it accepts, and saves."""
    with running(place / "root", listen="127.0.0.1:0") as daemon:
        trainer = Trainer(daemon)
        assert trainer.save(1) is None
        with Api(daemon.url) as api:
            wait_until(lambda: not api.nodes()[0].busy)  # the checkpoint is read back behind our back
            asking = sockets(daemon)
        wait_until(lambda: sockets(daemon) == asking - 1)
        soft, _ = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        taken = set(map(int, os.listdir(f"/proc/{daemon.process.pid}/fd")))
        limit(daemon, resource.RLIMIT_NOFILE, min(set(range(len(taken) + 1)) - taken))
        found = trainer.save(2)
        assert isinstance(found, StorageFailed) and os.strerror(errno.EMFILE) in found.detail, found
        assert "limit of open files" in found.hint
        late = threading.Thread(target=connect_late, args=(daemon,), daemon=True)
        late.start()
        time.sleep(0.5)
        limit(daemon, resource.RLIMIT_NOFILE, soft)
        late.join(180)
        assert not late.is_alive(), "a rank that came meanwhile was never heard"
        assert trainer.save(3) is None
        assert committed_steps(daemon.root, RUN) == [3, 1]
        trainer.close()
    ledger.survived(LANE)


def sockets(daemon: RunningDaemon) -> int:
    """How many the daemon has open."""
    count = 0
    for entry in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(entry).startswith("socket:")
    return count


def connect_late(daemon: RunningDaemon) -> None:
    """A rank that comes while the daemon can accept nobody, or has a descriptor for that alone, gets through in the end."""
    while True:
        try:
            return Trainer(daemon, run="another").close()
        except (StorageFailed, NoSpace) as refused:
            assert "limit of open files" in refused.hint, refused
            time.sleep(0.05)


def test_too_little_address_space(place: Path) -> None:
    """A segment that the daemon cannot map is refused by name with the numbers; with room again, the rank saves."""
    with running(place / "root") as daemon:
        text = Path(f"/proc/{daemon.process.pid}/statm").read_text()
        limit(daemon, resource.RLIMIT_AS, int(text.split()[0]) * resource.getpagesize() + 300 * 2**20)
        with pytest.raises((NoSpace, LimitExceeded), match=r"\d+") as caught:
            Trainer(daemon, nbytes=500 * 2**20)
        assert caught.value.hint
        limit(daemon, resource.RLIMIT_AS, resource.RLIM_INFINITY)
        trainer = Trainer(daemon)
        assert trainer.save(1) is None
        trainer.close()
    ledger.survived(LANE)


@pytest.mark.crash_slow
@needs_root
def test_dev_shm_too_small(place: Path) -> None:
    """Shared memory is no file in /dev/shm: 64 KiB there are enough for any state."""
    script = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    try:
        subprocess.run(["unshare", "-m", "sh", "-c", script, "sh", "true"], check=True, timeout=180)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no mount namespace of one's own here: {error}")
    daemon = RunningDaemon(place / "root", before=("unshare", "-m", "sh", "-c", script, "sh"))
    trainer = Trainer(daemon, nbytes=5_000_000)
    assert trainer.save(1) is None and committed_steps(daemon.root, RUN) == [1]
    trainer.close()
    assert daemon.stop() == 0
    ledger.survived(LANE)


@pytest.mark.crash_slow
@pytest.mark.usefixtures("forked_programs")
def test_a_second_daemon_while_the_first_one_saves(place: Path) -> None:
    """It is refused by name, and the save that was under way is committed."""
    with running(place / "root", "--write-bytes-per-second", "2000000") as daemon:
        trainer = Trainer(daemon, nbytes=2_000_000)
        saved: list[CheckpointError | None] = []
        thread = threading.Thread(target=lambda: saved.append(trainer.save(1)))
        thread.start()
        wait_until(lambda: (daemon.root / RUN / "staging").is_dir())
        other = ["--root", str(daemon.root), "--socket", str(place / "other.sock"), "--listen", "none"]
        command_line = [sys.executable, "-m", "holdfast_service", *other]
        done = subprocess.run(command_line, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 4 and "root-busy" in done.stderr and str(daemon.process.pid) in done.stderr
        thread.join()
        assert saved == [None]
        trainer.close()
    ledger.survived(LANE)

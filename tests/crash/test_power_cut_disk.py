"""A power cut under a real file system: the log of every block write of an ext4, replayed up to any point (I1, I3, I4).

Between two flushes a disk may keep any subset of the writes, in any order. Each such disk is mounted, which replays the
journal as after a crash, and opened with the real reader.
"""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from holdfast_service.control.checkpoints.removal import remove_checkpoint
from holdfast_service.storage import PosixStore, PosixTier, posix
from tests.crash import block_log, ledger, power
from tests.crash.block_log import Event, Flushed, Marked, Wrote
from tests.crash.disks import COMMAND_TIMEOUT_S, attached, command
from tests.crash.test_power_cut import RUN, Harm, harm, limit, state

LANE = "power cuts, blocks of ext4"
DISK_BYTES = 12 * 2**20
QUICK_CUTS = 24


@contextmanager
def logging_disk(image: Path, at: Path, log: Path) -> Iterator[None]:
    """The image served by FUSE in a process of its own, which writes the log in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.crash.block_log", image, at, log], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "mounted\n"
        try:
            yield
        finally:
            command("umount", at)
        assert process.wait(COMMAND_TIMEOUT_S) == 0
    finally:
        process.kill()
        process.stdout.close()  # type: ignore[union-attr] - it is a pipe
        process.wait()


class Recorded:
    """A disk as it was before, and what was written to it since."""

    def __init__(self, image: bytes, log: list[Event]) -> None:
        self.image, self.log = image, log

    def told(self, length: int) -> list[power.Told]:
        """What somebody relied on when so many events had been."""
        marks = (event.text.split() for event in self.log[:length] if isinstance(event, Marked))
        return [power.Told(what, int(step)) for what, step in marks]

    def disk(self, length: int, lost: Sequence[int] = ()) -> bytes:
        """The disk after so many events, but for the writes that were lost."""
        made = bytearray(self.image)
        for index, event in enumerate(self.log[:length]):
            if isinstance(event, Wrote) and index not in lost:
                made[event.offset : event.offset + len(event.data)] = event.data
        return bytes(made)

    def unflushed(self, length: int) -> list[int]:
        """The writes that a cut after so many events may lose."""
        flushes = [index for index, event in enumerate(self.log[:length]) if isinstance(event, Flushed)]
        first = flushes[-1] + 1 if flushes else 0
        return [index for index in range(first, length) if isinstance(self.log[index], Wrote)]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory in memory, where disks are made; skipped where this machine cannot do it."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists() or not Path("/dev/loop-control").exists():
        pytest.skip("mounting a logged disk needs root, /dev/fuse and loop devices")
    if not Path("/dev/shm").is_dir():
        pytest.skip("disks are made in memory, and there is no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        for name in ("fuse", "disk", "replayed"):
            Path(directory, name).mkdir()
        try:
            command("mkfs.ext4", "-V")
            record(Path(directory), lambda tier, tell: None)
        except (OSError, subprocess.SubprocessError, AssertionError) as error:
            pytest.skip(f"a logged disk cannot be mounted here: {error}")
        yield Path(directory)


def record(place: Path, act: Callable[[PosixTier, Callable[[str, int], None]], None]) -> Recorded:
    """What `act` does to a fresh ext4, block by block."""
    image, log = place / "image", place / "log"
    image.write_bytes(bytes(DISK_BYTES))
    command("mkfs.ext4", "-q", "-F", "-b", "1024", "-J", "size=1", image)
    before = image.read_bytes()
    with logging_disk(image, place / "fuse", log):
        marks = os.open(place / "fuse" / "mark", os.O_WRONLY)

        def tell(what: str, step: int) -> None:
            os.pwrite(marks, f"{what} {step}".encode(), 0)

        try:
            with attached(place / "fuse" / "disk", place / "disk"):
                act(PosixTier(place / "disk" / "root"), tell)
        finally:
            os.close(marks)
    return Recorded(before, block_log.read_log(log))


def save_and_remove(tier: PosixTier, tell: Callable[[str, int], None]) -> None:
    """Three saves, each followed by a change of run.json and by the removal of the one before."""
    for step in (1, 2, 3):
        state(step).save(tier)  # type: ignore[arg-type] - a tier is a tier
        tell("announced", step)
        limit(tier, step)
        tell("limited", step)
        if step > 1:
            tell("removing", step - 1)
            assert remove_checkpoint(PosixStore(tier), RUN, step - 1) is None


@pytest.fixture(scope="module")
def recorded(place: Path) -> Recorded:
    return record(place, save_and_remove)


def look_at(place: Path, disk: bytes, told: list[power.Told]) -> Harm | None:
    """What is wrong with a disk after a cut, before and after the sweep of the next start."""
    image = place / "cut"
    image.write_bytes(disk)
    with attached(image, place / "replayed") as mounted:
        root = mounted / "root"
        if not root.exists():
            return Harm("the root is gone") if told else None
        found = harm(root, told)
        if found is None:
            PosixStore(PosixTier(root)).sweep()
            found = harm(root, told)
        return found


def cuts(recorded: Recorded, chance: random.Random, subsets: int) -> Iterator[tuple[int, list[int]]]:
    """After every event: how many there were, and which unflushed writes were lost; none, and some random subsets."""
    for length in range(len(recorded.log) + 1):
        yield length, []
        pending = recorded.unflushed(length)
        for _ in range(subsets if pending else 0):
            yield length, chance.sample(pending, chance.randint(1, len(pending)))


def check(place: Path, recorded: Recorded, tried: list[tuple[int, list[int]]]) -> None:
    found = []
    for length, lost in tried:
        ledger.tried(LANE)
        each = look_at(place, recorded.disk(length, lost), recorded.told(length))
        if each is None:
            ledger.survived(LANE)
            continue
        ledger.lost(LANE, each.lost)
        ledger.wrong(LANE, each.wrong)
        found.append(f"after {length} events without {lost}: {each.what}")
    assert found == []


def test_a_sample_of_cuts_of_a_real_disk(place: Path, recorded: Recorded) -> None:
    """Some prefixes and subsets of the block log: what was announced is there, what is visible is whole."""
    assert sum(isinstance(event, Flushed) for event in recorded.log) > 20
    every = list(cuts(recorded, random.Random(0), 1))
    check(place, recorded, [*random.Random(1).sample(every, QUICK_CUTS), (len(recorded.log), [])])


@pytest.mark.crash_slow
def test_every_cut_of_a_real_disk(place: Path, recorded: Recorded) -> None:
    """Every prefix of the block log, and two random subsets of what was not flushed at each."""
    check(place, recorded, list(cuts(recorded, random.Random(2), 2)))


@pytest.mark.parametrize("gone", ["files", "directories"])
def test_a_real_disk_finds_an_fsync_that_is_not_made(place: Path, gone: str) -> None:
    """Without the fsync of files, or of directories, there is a cut that breaks a promise."""
    is_gone = stat.S_ISREG if gone == "files" else stat.S_ISDIR

    def fsync(descriptor: int) -> None:
        if not is_gone(os.fstat(descriptor).st_mode):
            os.fsync(descriptor)

    with mock.patch.object(posix, "_fsync", fsync):
        recorded = record(place, save_and_remove)
    marked = [index + 1 for index, event in enumerate(recorded.log) if isinstance(event, Marked)]
    tried = [(length, []) for length in marked] + list(cuts(recorded, random.Random(3), 1))
    assert any(look_at(place, recorded.disk(length, lost), recorded.told(length)) for length, lost in tried)

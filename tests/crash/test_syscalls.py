"""Every N-th system call and SQL commit of a save fails, for all N until a save passes (I1, I3, I9)."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from holdfast.read.directory_root import committed_steps
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, NoSpace, StorageFailed
from holdfast_service.storage import PosixTier, posix
from tests.crash import ledger
from tests.crash.calls import Fault, Place, PlaceFault, steered
from tests.daemon.saver_world import RUN, SIZE, SaverWorld
from tests.in_memory import in_memory

CALLS_MAX = 2000
KEEP = 2
PASSES = 3  # saves without a fault, one after the other, until it is believed: rotation does its calls at a time of its own
LARGE_WINDOW_BYTES = 2**19
LARGE_BYTES = 2 * LARGE_WINDOW_BYTES + 1000
LANE = "failing system calls"
MUST_FAIL = {"open", "mkdir", "fallocate", "pwritev", "fsync", "renameat2", "preadv", "sql commit", "rmdir", "unlink"}


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of saves are made here, and not one of them is to last."""
    with in_memory() as directory:
        yield directory / "root"


class Trial:
    """A run that saves step after step, keeps two, and in which one call may fail while a step is saved."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.world = SaverWorld(PosixTier(root), KEEP)
        (self.rank,) = self.world.launch(1)
        self.step = 0
        self.save()

    def save(self, fault: Fault | PlaceFault | None = None) -> dict | None:
        """Save the next step until storage and verification are at rest; the problem it ended with, if any."""
        self.step += 1
        with steered(fault or (lambda name, call, *given, **options: call(*given, **options))):
            try:
                self.rank.save(self.step)
                problem = self.rank.wait(self.step).problem
            except CheckpointError as error:
                problem = error.problem()
            self.world.saver.close()
            assert self.world.control.rotation.wait_until_applied()
        self.world.saver = type(self.world.saver)(self.world.tier, self.world.control, "node")
        self.world.saver.join(self.rank.who)
        return problem

    def visible(self) -> list[int]:
        """The visible steps, after each was read back whole; nothing else may stand among them."""
        found = self.world.committed()
        assert sorted(committed_steps(self.root, RUN)) == found
        assert len(os.listdir(self.root / RUN / naming.CHECKPOINTS)) == len(found)
        return found

    def check(self, before: list[int], problem: dict | None, fault: Fault | PlaceFault, cause: str) -> None:
        """What must hold after a save in which `fault` happened."""
        visible = self.visible()
        new = [step for step in visible if step not in before]
        assert new in ([], [self.step]), fault.failed
        assert before[-1] in visible, f"{fault.failed}: the newest checkpoint is gone"
        kept = {step for step in (*before, *new)} - set(visible)
        assert len(visible) >= min(KEEP, len(before)), f"{fault.failed}: {kept} went too early"
        assert problem or new, f"{fault.failed}: announced and not there"
        if problem:
            assert cause in problem["detail"], f"{fault.failed}: {problem['detail']} does not name the cause"
            assert problem["hint"], f"{fault.failed}: {problem['detail']} comes without a hint"

    def close(self) -> None:
        self.world.control.recovery.recover()
        assert self.world.tier.list(f"{RUN}/{naming.STAGING}") == []
        assert self.world.tier.list(f"{RUN}/{naming.TRASH}") == []
        self.visible()
        self.world.close()


def try_all(root: Path, made: Callable[[int], Fault | PlaceFault], causes: Sequence[str]) -> set[str]:
    """Saves with the first, second, … call failing until one passes; which calls failed."""
    trial, failed, at, passed = Trial(root), set(), 1, 0
    before = trial.visible()
    while passed < PASSES:
        fault = made(at)
        ledger.tried(LANE)
        problem = trial.save(fault)
        cause = causes[-1] if fault.failed == "sql commit" else causes[0]
        trial.check(before, problem, fault, cause)
        assert trial.save() is None, f"the save after a failed {fault.failed}"
        before = trial.visible()
        assert trial.step in before
        ledger.survived(LANE)
        at += 1
        if fault.failed:
            failed.add(fault.failed)
            passed = 0
        else:
            assert problem is None
            passed += 1
        assert at < CALLS_MAX, "no save ever passed"
    trial.close()
    return failed


def test_a_full_or_failing_disk_at_every_call(root: Path) -> None:
    """The save before is whole, nothing partial is visible, the error names the cause, and the next save works.

    Every call that the product makes, but those in a loop once: `test_every_cause_at_every_call` takes each of them.
    """
    tried: set[Place] = set()
    causes = (os.strerror(errno.EIO), "disk I/O error")
    assert try_all(root, lambda at: PlaceFault(errno.EIO, tried), causes) >= MUST_FAIL


def test_every_write_that_takes_half(root: Path) -> None:
    """A write that takes half, and then finds the disk full, leaves nothing behind."""
    full = os.strerror(errno.ENOSPC)
    assert try_all(root, lambda at: Fault(at, errno.ENOSPC, short=True), (full,)) == {"pwritev"}


@pytest.mark.crash_slow
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSPC, "disk is full"),
        (errno.EDQUOT, "disk I/O error"),
        (errno.EROFS, "readonly"),
        (errno.EIO, "disk I/O error"),
        (errno.EMFILE, "disk I/O error"),
    ],
    ids=["full", "quota", "read-only", "broken", "descriptors"],
)
def test_every_cause_at_every_call(root: Path, code: int, says: str) -> None:
    """The same for every errno that a disk gives in practice."""
    try_all(root, lambda at: Fault(at, code), (os.strerror(code), says))


def test_shared_memory_that_cannot_be_made_or_mapped(root: Path) -> None:
    """`NoSpace` names the bytes, nothing of the budget is gone, and the next reservation works."""
    from holdfast_formats.staging import arena
    from holdfast_service.daemon.arena.arena import Arena
    from holdfast_service.daemon.arena.budget import Budget

    made = Arena(Budget(2**30))
    asked = arena.geometry(2, SIZE, 4096)
    descriptors = len(os.listdir("/proc/self/fd"))  # fewer may be left: what other tests forgot is collected at any time
    for name in ("memfd_create", "ftruncate", "mmap"):
        ledger.tried(LANE)
        fault = Failing(name, errno.ENOMEM)
        with steered(fault), pytest.raises(CheckpointError) as caught:
            made.reserve(asked, "rank0", None)
        assert isinstance(caught.value, NoSpace) and os.strerror(errno.ENOMEM) in caught.value.detail, name
        assert made.bytes == 0 and len(os.listdir("/proc/self/fd")) <= descriptors, name
        ledger.survived(LANE)
    made.drop(made.reserve(asked, "rank0", None))


def test_every_call_of_a_large_file(tmp_path: Path) -> None:
    """Past the page cache too: the failure is named, no descriptor stays open, and the next try writes every byte."""
    tier = PosixTier(tmp_path / "root")
    data = mmap.mmap(-1, LARGE_BYTES)  # aligned, as windows are
    data.write(np.random.default_rng(0).bytes(LARGE_BYTES))
    descriptors = len(os.listdir("/proc/self/fd"))  # fewer may be left: what other tests forgot is collected at any time
    failed, at = set(), 1
    while True:
        ledger.tried(LANE)
        fault = Fault(at, errno.EIO)
        try:
            with steered(fault):
                write_large(tier, memoryview(data))
        except StorageFailed as error:
            assert os.strerror(errno.EIO) in error.detail and error.hint
        else:
            assert not fault.failed, f"nobody heard of a failed {fault.failed}"
        assert len(os.listdir("/proc/self/fd")) <= descriptors, fault.failed
        tier.remove_tree("s")
        write_large(tier, memoryview(data))
        assert tier.read("s/file") == data[:]
        tier.remove_tree("s")
        ledger.survived(LANE)
        if not fault.failed:
            break
        failed.add(fault.failed)
        at += 1
    assert {"open", "fallocate", "pwritev", "fsync"} <= failed


def write_large(tier: PosixTier, data: memoryview) -> None:
    """A file of several windows, and an unaligned end."""
    writer = tier.create("s/file", len(data))
    try:
        for start in range(0, len(data), LARGE_WINDOW_BYTES):
            writer.write(start, [data[start : start + LARGE_WINDOW_BYTES]])
        writer.finish()
    finally:
        writer.discard()


class Failing:
    """Lets every call of one name fail."""

    def __init__(self, name: str, code: int) -> None:
        self._name, self._code = name, code

    def __call__(self, name: str, call, *arguments, **options):
        if name == self._name:
            raise OSError(self._code, os.strerror(self._code))
        return call(*arguments, **options)


def test_a_failed_sync_is_not_tried_again(root: Path) -> None:
    """I9: a disk that fails one fsync and passes the next has lost the pages: the round ends, whatever comes after."""
    trial = Trial(root)
    synced: list[int] = []

    def once(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        if len(synced) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(descriptor)

    with mock.patch.object(posix, "_fsync", once):
        problem = trial.save()
    assert problem is not None and problem["code"] == StorageFailed.code
    assert trial.visible() == [1] and synced.count(synced[0]) == 1
    trial.close()

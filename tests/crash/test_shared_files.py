"""Files that several checkpoints share: killed, cut or failing at any moment, all checkpoints are whole (I1, I4)."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from holdfast.read.directory_root import committed_steps
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.control.checkpoints import commit, planner
from holdfast_service.control.recovery import sweep
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying import hard_links
from holdfast_service.daemon.copying.second_copier import SecondCopier
from holdfast_service.daemon.writing import writer
from holdfast_service.storage import PosixStore, PosixTier
from tests.checkpoints import build_root
from tests.crash import ledger, power
from tests.crash.calls import Fault, PlaceFault, steered
from tests.crash.frozen_saves import go_on
from tests.crash.points import Place, place, stop_at
from tests.daemon.copies_world import CopiesWorld, copies_world
from tests.daemon.frozen_training import BASE_FILE
from tests.daemon.saver_world import RUN, saver_world
from tests.daemon.writing.test_path import Shards
from tests.daemons import wait_until
from tests.in_memory import in_memory

__all__ = ["place"]

LANE = "a call of a second copy fails"
POINTS = (
    "before a file is linked",
    "a file is linked",
    "a second copy is staged",
    "before a second copy is put",
    "a second copy is put",
)
ARRAYS = {"base": {"w": np.arange(700, dtype=np.uint32)}, "model": {"a": np.zeros(9, np.uint8)}}


@pytest.fixture
def directory() -> Iterator[Path]:
    with in_memory() as made:
        yield made


def inode(root: Path, step: int, file: str = BASE_FILE) -> int:
    return (root / naming.checkpoint_path(RUN, step) / file).stat().st_ino


def check_all(root: Path) -> list[int]:
    """Every checkpoint that stands is whole; the steps, ascending."""
    steps = sorted(committed_steps(root, RUN))
    for step in steps:
        verify(PosixTier(root), naming.checkpoint_path(RUN, step))
    return steps


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_every_point(place: Place, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """By SIGKILL. What was committed is whole, and the next daemon goes on with it; nothing is left beside it."""
    stop_at(point, place, monkeypatch)
    (place.marks / "armed").touch()
    with subprocess.Popen([sys.executable, "-m", "tests.crash.frozen_saves", str(place.root), "4"]) as program:
        wait_until(lambda: place.stopped is not None)
        os.kill(program.pid, signal.SIGKILL)
    done = check_all(place.root)
    assert done
    monkeypatch.undo()
    with saver_world(PosixTier(place.root)) as world:
        go_on(world, place.root, 4)
    steps = check_all(place.root)
    assert steps == [*done, *range(done[-1] + 1, done[-1] + 5)]
    inodes = [inode(place.root, step) for step in steps]
    assert len(set(inodes)) == 2 and all(a != b for a, b in pairwise(inodes))
    assert not [*(place.root / RUN / naming.STAGING).iterdir(), *(place.root / RUN / naming.TRASH).glob("*")]


def save(tier: PosixTier, step: int, source: int | None = None) -> None:
    """A checkpoint of two groups, of which one file is taken from an earlier one."""
    shards, store = Shards(1, step), PosixStore(tier)
    for group, seed in (("base", 0), ("model", step)):
        content = np.random.default_rng(seed).integers(0, 256, 1700, np.uint8).tobytes()
        spec = TensorSpec(group, "w", "U8", (1700,))
        shards.add(spec, content, [(0, [Box((0,), spec.shape)])])
    plan = planner.plan([msgspec.structs.replace(one, groups=("base", "model")) for one in shards.tables()])
    slots = {0: memoryview(bytes(shards.data[0]))}
    staged = store.begin(naming.Place(RUN, step, shards.attempt))
    taken = {}
    if source is not None:
        (file,) = [file for file in plan.files if file.layout.group == "base"]
        assert staged.take(file.layout.name, source)
        entry = verify(tier, naming.checkpoint_path(RUN, source)).tensors["base"]["w"]
        taken[file.layout.name] = [(file.tensors[0], extent) for extent in entry.extents]
    writer.write(staged, plan, slots, "node", taken=taken)
    commit.publish(store, plan, "2026-01-01T00:00:00Z")


def test_a_cut_after_every_operation_of_a_save_that_links(directory: Path) -> None:
    """Then the first one is removed. Whatever survives, no checkpoint is there that is not whole."""
    root = directory / "recorded"
    tier, recorder = PosixTier(root), power.Recorder(root)
    with steered(recorder):
        save(tier, 7)
        first = len(recorder.operations)
        save(tier, 8, source=7)
        second = len(recorder.operations)
        store = PosixStore(tier)
        store.free(store.remove(RUN, 7))
        removed = len(recorder.operations)
    assert inode(root, 8) and check_all(root) == [8]
    seen, known = set(), set()
    for number, (length, tree) in enumerate(power.cuts(recorder.operations, random.Random(0), 2)):
        key = (tuple(tree.items()), length)
        if length < first or key in known:
            continue
        known.add(key)
        made = directory / f"cut-{number}"
        power.build(tree, made)
        sweep(PosixStore(PosixTier(made)))
        steps = check_all(made)
        assert 7 in steps or length >= second
        assert 8 in steps or length < second
        assert 7 not in steps or length < removed
        seen.add(tuple(steps))
        shutil.rmtree(made)
    assert seen == {(7,), (7, 8), (8,)}


def test_a_fault_of_every_call_of_a_save_that_links(directory: Path) -> None:
    """The checkpoint from which it takes the file stays as it was."""
    save(PosixTier(directory / "saved"), 7)
    for at in range(1, 1000):
        root = directory / f"fault-{at}"
        shutil.copytree(directory / "saved", root)
        fault, tier = Fault(at, errno.EIO), PosixTier(root)
        with steered(fault):
            try:
                save(tier, 8, source=7)
                failed = False
            except CheckpointError:
                failed = True
        sweep(PosixStore(PosixTier(root)))
        assert 7 in check_all(root) and (failed or 8 in check_all(root))
        shutil.rmtree(root)
        if not fault.failed:
            assert not failed and at > 20
            return
    raise AssertionError("the calls of a save did not end")


def shared(world: CopiesWorld, number: int) -> str:
    """A run of two verified checkpoints that share a file."""
    run = f"run-{number}"
    build_root(world.root, {run: (1, 2)}, ARRAYS)
    first, second = (world.root / naming.checkpoint_path(run, step) / BASE_FILE for step in (1, 2))
    second.unlink()
    os.link(first, second)
    world.control.recovery.recover()
    for step in (1, 2):
        world.control.findings.sound(run, step)
    assert world.control.rotation.wait_until_applied() and world.control.record_queue.recorded(30)
    return run


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_fault_at_every_place_of_a_second_copy(directory: Path, code: int) -> None:
    """The file is the shared one or the copy; the next try makes it, and the next start sweeps what is left."""
    tried: set[tuple[str, ...]] = set()
    with copies_world(directory) as world:
        control = world.control
        for number in range(1, 1000):
            run, fault = shared(world, number), PlaceFault(code, tried)
            ledger.tried(LANE)
            copier = SecondCopier(control.store, control.second_copies, control.readers)
            with steered(fault):
                try:
                    copier.run_once(run)
                except CheckpointError as error:
                    assert error.hint, error
                assert control.record_queue.recorded(30)
            for step in (1, 2):
                verify(world.tier, naming.checkpoint_path(run, step))
                control.findings.sound(run, step)  # as the scrub does where the copy could not be recorded
            copier.run_once(run)
            files = [world.root / naming.checkpoint_path(run, step) / BASE_FILE for step in (1, 2)]
            assert files[0].stat().st_ino != files[1].stat().st_ino, fault.failed
            control.recovery.recover()
            left = [*(world.root / run / naming.STAGING).iterdir()]
            assert left == [], fault.failed
            assert [world.catalog.checkpoint(run, step).shared_bytes for step in (1, 2)] == [0, 0], fault.failed
            ledger.survived(LANE)
            shutil.rmtree(world.root / run)
            if not fault.failed:
                assert len(tried) > 10
                return
    raise AssertionError("the places of a second copy did not end")


def test_a_cut_after_every_operation_of_a_second_copy(directory: Path) -> None:
    """The file is the shared one or the copy, whole; the other checkpoint is not touched."""
    root = directory / "recorded"
    tier, recorder = PosixTier(root), power.Recorder(root)
    with steered(recorder):
        save(tier, 7)
        save(tier, 8, source=7)
        begun = len(recorder.operations)
        store, where = PosixStore(tier), naming.job_place(RUN, 8, "1")
        path = naming.checkpoint_path(RUN, 8)
        data = tier.read(f"{path}/{BASE_FILE}")
        file = store.begin(where).create(BASE_FILE, len(data))
        file.write(0, [data])
        file.finish()
        store.mend(where, tier.read(f"{path}/{naming.MANIFEST}"), tier.read(f"{path}/{naming.COMMIT}"))
    assert all_cuts_are_whole(directory, recorder, begun) > 20


def test_a_cut_after_every_operation_of_a_repair_that_is_shared(directory: Path) -> None:
    """The other checkpoint has its old file or the repaired one, whole."""
    root = directory / "recorded"
    tier, recorder = PosixTier(root), power.Recorder(root)
    with steered(recorder):
        save(tier, 7)
        save(tier, 8)
        begun = len(recorder.operations)
        hard_links.share(PosixStore(tier), naming.CheckpointId(RUN, 7), BASE_FILE, 8)
    assert inode(root, 7) == inode(root, 8)
    assert all_cuts_are_whole(directory, recorder, begun) > 5


def all_cuts_are_whole(directory: Path, recorder: power.Recorder, begun: int) -> int:
    """Steps 7 and 8 are whole, and nothing is staged, after each power cut since; how many."""
    tried = 0
    for number, (length, tree) in enumerate(power.cuts(recorder.operations, random.Random(0), 2)):
        if length < begun:
            continue
        made = directory / f"cut-{number}"
        power.build(tree, made)
        sweep(PosixStore(PosixTier(made)))
        assert check_all(made) == [7, 8]
        assert not [*(made / RUN / naming.STAGING).iterdir()]
        tried += 1
        shutil.rmtree(made)
    return tried

"""Whatever bit turns round and wherever a file is cut: found, named, and made what it was, where a replica exists (bar 2).

And whenever a repair or a copy is cut off itself: what stands there is the damaged file or the sound one (I4, I7).
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import verification
from holdfast_formats.errors import CheckpointError, Damaged
from holdfast_formats.naming import CheckpointId
from holdfast_service.control.checkpoints.commit import publish_copy
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.copies import CopyControl, carry
from holdfast_service.daemon.copying.repair import RepairCandidates, RepairOutcome, mend
from holdfast_service.storage import PosixStore, PosixTier
from tests.checkpoints import build, flip
from tests.crash import ledger, power
from tests.crash.calls import Fault, Place, PlaceFault, steered
from tests.in_memory import in_memory

RUN, STEP = "tiny", 5
DIRECTORY = naming.checkpoint_path(RUN, STEP)
PLACE = naming.Place(RUN, STEP, naming.NO_ATTEMPT)
TENSORS = 50
PLACES, PLACES_SLOW = 250, 10_000
CALLS_MAX = 1000
UNLISTED = (naming.MANIFEST, naming.COMMIT)
LANE, FAULTS, CUTS = "damage that a replica mends", "failing system calls of repairs", "power cuts in repairs"


class Pair:
    """A checkpoint of fifty tensors in two groups and several files, its replica, and what both were made as."""

    def __init__(self, directory: Path, tensors: int = TENSORS) -> None:
        rng = np.random.default_rng(5)
        arrays: dict[str, dict[str, np.ndarray]] = {"model": {}, "optim": {}}
        for index in range(tensors):
            shape = (int(rng.integers(1, 40)), int(rng.integers(1, 60)))
            name = f"layers.{index}.weight"
            arrays[("model", "optim")[index % 2]][name] = rng.standard_normal(shape).astype(np.float32)
        self.path = directory / "here" / DIRECTORY
        self.built = build(self.path, arrays, run=RUN, step=STEP, file_bytes_max=40_000)
        shutil.copytree(self.path, directory / "there" / DIRECTORY)
        self.here, self.there = PosixTier(directory / "here"), PosixTier(directory / "there")
        self.files = {path.name: path.read_bytes() for path in sorted(self.path.iterdir())}
        self.pieces = verification.pieces(self.built.manifest)

    def check(self) -> Damaged | None:
        """What a check after the commit, or a scrub, would name."""
        try:
            verify(self.here, DIRECTORY)
        except Damaged as error:
            return error
        return None

    def mend(self, error: CheckpointError | None) -> RepairOutcome:
        elsewhere = RepairCandidates({"replica there": self.there}, lambda made: nullcontext(), None)
        return mend(PosixStore(self.here), CheckpointId(RUN, STEP), error, elsewhere)

    def stored(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.path.iterdir())}

    def restore(self) -> None:
        """All files as they were made, by plain means."""
        for name, data in self.files.items():
            (self.path / name).write_bytes(data)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with in_memory() as directory:
        yield Pair(directory)


def damage(pair: Pair, chance: random.Random) -> tuple[str, int]:
    """Turn one bit, or cut a file, at a random place; in which file, and where."""
    position = chance.randrange(sum(len(data) for data in pair.files.values()))
    name = next(iter(pair.files))
    for name, data in pair.files.items():  # noqa: B007 - the one at which it ends
        if position < len(data):
            break
        position -= len(data)
    if chance.random() < 0.5:
        flip(pair.path / name, position, chance.randrange(8))
    else:
        os.truncate(pair.path / name, position)
    return name, position


def try_places(pair: Pair, count: int, seed: int) -> None:
    """Damage at so many places, one after the other: each is found, named, mended, and the file is what it was."""
    chance = random.Random(seed)
    for _ in range(count):
        file, position = damage(pair, chance)
        ledger.tried(LANE)
        error = pair.check()
        assert error is not None, f"{file}, byte {position}: not found"
        if file not in UNLISTED:
            members = error.members
            (piece,) = verification.overlapping(pair.pieces[file], position, position + 1)
            assert members["file"] == file and members["offset"] <= position < members["offset"] + members["length"]
            assert members["tensor"] == piece.tensor or piece.tensor is None
        outcome = pair.mend(error)
        assert outcome.left is None and [mended.file for mended in outcome.mended] == [file]
        now = (pair.path / file).read_bytes()
        ledger.wrong(LANE, sum(a != b for a, b in zip(now, pair.files[file], strict=False)))
        assert now == pair.files[file], f"{file}, byte {position}: not what it was"
        ledger.survived(LANE)
    assert pair.stored() == pair.files and pair.here.list(f"{RUN}/{naming.STAGING}") == []


def test_damage_at_random_places_is_mended(pair: Pair) -> None:
    """A few hundred flips and cuts."""
    try_places(pair, PLACES, seed=1)


@pytest.mark.crash_slow
def test_damage_at_ten_thousand_places_is_mended(pair: Pair) -> None:
    """As many as the bar asks for."""
    try_places(pair, PLACES_SLOW, seed=2)


@pytest.mark.parametrize("loops", [False, pytest.param(True, marks=pytest.mark.crash_slow)], ids=["", "in-loops-too"])
@pytest.mark.parametrize("file", ["tensors", naming.MANIFEST, naming.COMMIT])
def test_every_call_of_a_repair_fails(file: str, loops: bool) -> None:
    """The file is the damaged one or the sound one, byte for byte; the next repair works, and a sweep leaves nothing.

    Of the calls in a loop the first one fails, or each of them.
    """
    tried: set[Place] = set()
    with in_memory() as directory:
        pair = Pair(directory, 4)
        name = next(f.name for f in pair.built.manifest.files if f.header_bytes) if file == "tensors" else file
        failed, at = set(), 1
        while True:
            flip(pair.path / name, len(pair.files[name]) - 9)
            before = pair.stored()
            error, fault = pair.check(), Fault(at, errno.EIO) if loops else PlaceFault(errno.EIO, tried)
            assert error is not None
            ledger.tried(FAULTS)
            # Fewer may be left: what other tests forgot to close is collected at any time.
            descriptors = len(os.listdir("/proc/self/fd"))
            with steered(fault):
                try:
                    left = pair.mend(error).left
                except CheckpointError as raised:
                    left = raised
            assert len(os.listdir("/proc/self/fd")) <= descriptors, fault.failed
            now = pair.stored()
            assert now in (before, pair.files), f"{fault.failed}: neither the old file nor the sound one"
            if left is None:
                assert now == pair.files, f"{fault.failed}: said to be mended"
            assert pair.mend(None).left is None and pair.stored() == pair.files
            PosixStore(pair.here).sweep()
            assert pair.here.list(f"{RUN}/{naming.STAGING}") == []
            ledger.survived(FAULTS)
            if not fault.failed:
                break
            failed.add(fault.failed)
            at += 1
            assert at < CALLS_MAX, "no repair ever passed"
        assert failed >= {"open", "pwritev", "fsync", "rename", "preadv"}


def test_every_call_of_a_copy_fails() -> None:
    """Nothing partial stands in the other tier, and the next try makes a sound copy."""
    with in_memory() as directory:
        pair = Pair(directory, 4)
        read = open_checkpoint(pair.here, DIRECTORY)
        failed, at = set(), 1
        while True:
            target = PosixTier(directory / f"copy-{at}")
            fault = Fault(at, errno.EIO)
            ledger.tried(FAULTS)
            try:
                with steered(fault):
                    copy(pair, target, read)
            except CheckpointError:
                assert fault.failed
            for name in target.list(f"{RUN}/{naming.CHECKPOINTS}"):
                verify(target, f"{RUN}/{naming.CHECKPOINTS}/{name}")
            PosixStore(target).sweep()
            if not target.list(DIRECTORY):
                copy(pair, target, read)
            assert {n: target.read(f"{DIRECTORY}/{n}") for n in target.list(DIRECTORY)} == pair.files
            ledger.survived(FAULTS)
            shutil.rmtree(target.root)
            if not fault.failed:
                break
            failed.add(fault.failed)
            at += 1
            assert at < CALLS_MAX, "no copy ever passed"
        assert failed >= {"open", "mkdir", "pwritev", "fsync", "renameat2", "preadv"}


def copy(pair: Pair, target: PosixTier, read) -> None:
    """What a replica's worker does with one checkpoint."""
    store = PosixStore(target)
    carry(pair.here, DIRECTORY, store.begin(PLACE), read.manifest, CopyControl())
    publish_copy(store, PLACE, read.encoded, read.commit)


class Story:
    """A copy of a checkpoint that is damaged and then mended, as the disk's log has it."""

    def __init__(self, directory: Path) -> None:
        self.pair = Pair(directory, 3)
        root = directory / "recorded"
        target = PosixTier(root)
        recorder = power.Recorder(root)
        self.file = next(f.name for f in self.pair.built.manifest.files if f.header_bytes)
        with steered(recorder):
            copy(self.pair, target, open_checkpoint(self.pair.here, DIRECTORY))
            self.sound = self.pair.files[self.file]
            at = len(self.sound) - 9
            path = root / DIRECTORY / self.file
            node = recorder._nodes[os.stat(path).st_ino]
            flip(path, at)
            self.damaged = path.read_bytes()
            recorder.operations += [power.Written(node, at, self.damaged[at : at + 1]), power.Synced(node)]
            self.begin = len(recorder.operations)
            elsewhere = RepairCandidates({"replica there": self.pair.there}, lambda made: nullcontext(), None)
            assert mend(PosixStore(target), CheckpointId(RUN, STEP), None, elsewhere).left is None
            recorder.tell("mended", STEP)
        self.operations = recorder.operations

    def harms(self, operations: list[power.Operation], seed: int, samples: int) -> Iterator[str]:
        """What is wrong with each state after a cut that comes after the damage; empty where nothing is."""
        for length, tree in power.cuts(operations, random.Random(seed), samples):
            if length < self.begin:
                continue
            told = any(isinstance(op, power.Told) for op in operations[:length])
            found = {path.rpartition("/")[2]: data for path, data in tree.items() if path.startswith(f"{DIRECTORY}/")}
            allowed = [self.sound] if told else [self.sound, self.damaged]
            whole = found.get(self.file) in allowed and {**found, self.file: self.sound} == self.pair.files
            yield "" if whole else f"after {length} operations"


@pytest.fixture(scope="module")
def story() -> Iterator[Story]:
    with in_memory() as directory:
        yield Story(directory)


def test_a_cut_after_every_operation_of_a_repair(story: Story) -> None:
    """The old file or the new one, whole, whatever of the rest survives; and what was said to be mended is."""
    found = []
    for harm in story.harms(story.operations, seed=0, samples=10):
        ledger.tried(CUTS)
        ledger.survived(CUTS, not harm)
        found += [harm] if harm else []
    assert found == []


@pytest.mark.parametrize("gone", ["the new file", "the checkpoint's directory"])
def test_without_one_kind_of_sync_a_repair_does_harm(story: Story, gone: str) -> None:
    """The lab finds what each fsync of a repair is for."""
    begin, after = story.operations[: story.begin], story.operations[story.begin :]
    made, named = (begin, naming.staging_directory(STEP, naming.NO_ATTEMPT)) if "directory" in gone else (after, story.file)
    node = next(op.node for op in made if isinstance(op, power.Made) and op.name == named)
    without = power.without_syncs(after, lambda synced: synced == node)
    assert len(without) < len(after)
    assert any(story.harms([*begin, *without], seed=0, samples=10))

"""Repair: whatever is damaged becomes, byte for byte, what was written, if any source has it; and nothing else changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CheckpointsMissing, CorruptExtent, Damaged, NoSuchCheckpoint
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.repair import Repairer
from holdfast_service.daemon.copying.second_copier import SecondCopier
from holdfast_service.storage import PosixTier
from tests.checkpoints import build, flip, varied_arrays
from tests.daemon import frozen_training
from tests.daemon.copies_world import RUN, CopiesWorld, contents, copies, copies_world
from tests.daemon.frozen_training import BASE_BYTES, BASE_FILE, Training
from tests.daemon.saver_world import RUN as SAVED
from tests.daemon.saver_world import SaverWorld, saver_world
from tests.daemons import wait_until

DIRECTORY = naming.checkpoint_path(RUN, 5)


world = copies(copied=True)


def found(world: CopiesWorld) -> Damaged:
    """The damage that a check names."""
    with pytest.raises(Damaged) as caught:
        verify(world.tier, DIRECTORY)
    return caught.value


def every_file(world: CopiesWorld) -> list[str]:
    return sorted(path.name for path in world.path().iterdir())


def test_any_file_in_any_way(world: CopiesWorld) -> None:
    """Flipped, cut, lengthened, emptied or gone: each file of the checkpoint is again what it was."""
    before = contents(world.path())
    for name in every_file(world):
        path, size = world.path() / name, len(before[name])
        ways = [lambda p=path, s=size: os.truncate(p, s + 3), lambda p=path: p.unlink()]
        if size:
            ways += [lambda p=path, s=size: flip(p, s // 2), lambda p=path, s=size: os.truncate(p, s - 1)]
            ways += [lambda p=path: os.truncate(p, 0)]
        for way in ways:
            way()
            assert world.repairer.repair(RUN, 5, found(world)) is not None, name
            assert contents(world.path()) == before, name
    assert world.tier.list(f"{RUN}/{naming.STAGING}") == []


def test_it_is_told_and_recorded(world: CopiesWorld) -> None:
    """The event says file, tensor, range and source; the checkpoint is verified, and its damage forgotten."""
    name, entry = next((n, e) for n, e in world.built[RUN, 5].manifest.tensors["model"].items() if e.nbytes)
    flip(world.path() / entry.file, entry.start + 1)
    assert world.repairer.repair(RUN, 5, found(world)) == "replica far"
    (told,) = world.events("checkpoint-repaired")
    length = entry.extents[0].length
    assert told == {
        "file": entry.file, "tensor": name, "offset": entry.start, "length": length, "ranges": 1, "source": "replica far"
    }  # fmt: skip
    assert world.catalog.checkpoint(RUN, 5).state == "verified"


def test_several_files_at_once(world: CopiesWorld) -> None:
    """What the error does not name is found and mended too, also where nothing was named."""
    before = contents(world.path())
    for name in every_file(world):
        if before[name]:
            flip(world.path() / name, len(before[name]) // 3)
    outcome = world.repairer.run(RUN, 5)
    assert outcome.left is None and contents(world.path()) == before
    assert {mended.file for mended in outcome.mended} == {name for name in before if before[name]}


def test_verification_come_from_wherever_they_are_sound(tmp_path: Path) -> None:
    """One file, damaged here and, elsewhere, in each replica: every piece is taken from one that has it."""
    with copies_world(tmp_path, replicas=("far", "near")) as world:
        world.copy("far")
        world.copy("near")
        before = contents(world.path())
        manifest = world.built[RUN, 5].manifest
        entries = [e for e in manifest.tensors["model"].values() if e.nbytes]
        file = next(e.file for e in entries if len([o for o in entries if o.file == e.file]) > 1)
        entries = [e for e in entries if e.file == file]
        first, second = sorted(entries, key=lambda e: e.start)[:2]
        for entry in (first, second):
            flip(world.path() / file, entry.start)
        flip(tmp_path / "far" / DIRECTORY / file, first.start)
        flip(tmp_path / "near" / DIRECTORY / file, second.start)
        assert world.repairer.repair(RUN, 5, found(world)) == "replica near, replica far"
        assert contents(world.path()) == before


def test_what_nobody_has_stays_as_it_is(tmp_path: Path) -> None:
    """Without a source the damaged file is not touched, and the damage is named; what can be mended still is."""
    with copies_world(tmp_path, replicas=()) as world:
        entry = next(e for e in world.built[RUN, 5].manifest.tensors["model"].values() if e.nbytes)
        flip(world.path() / entry.file, entry.start)
        damaged = contents(world.path())
        outcome = world.repairer.run(RUN, 5, found(world))
        assert isinstance(outcome.left, CorruptExtent) and outcome.left.members["file"] == entry.file
        assert outcome.source is None and world.repairer.repair(RUN, 5, found(world)) is None
        assert contents(world.path()) == damaged
        assert world.events("checkpoint-repaired") == []


def test_headers_and_indexes_follow_from_the_manifest(tmp_path: Path) -> None:
    """They need no replica at all; nor does COMMIT, while the digest can still be read in it."""
    with copies_world(tmp_path, replicas=()) as world:
        before = contents(world.path())
        flip(world.path() / "model.safetensors.index.json", 20)
        flip(world.path() / next(f.name for f in world.built[RUN, 5].manifest.files if f.header_bytes), 30)
        flip(world.path() / "empty.txt", 0) if before["empty.txt"] else (world.path() / "empty.txt").unlink()
        os.truncate(world.path() / naming.COMMIT, len(before[naming.COMMIT]) - 4)
        assert world.repairer.repair(RUN, 5, found(world)) == "manifest"
        assert contents(world.path()) == before


def test_a_replica_of_another_checkpoint_is_no_source(tmp_path: Path) -> None:
    """Its own pair is sound, and its tensors have the same names: nothing is taken from it."""
    with copies_world(tmp_path, replicas=()) as world:
        build(tmp_path / "other" / DIRECTORY, varied_arrays(seed=1), run=RUN)
        world.add("other", PosixTier(tmp_path / "other")).run_once()
        entry = next(e for e in world.built[RUN, 5].manifest.tensors["model"].values() if e.nbytes)
        flip(world.path() / entry.file, entry.start)
        flip(world.path() / naming.COMMIT, 40)
        damaged = contents(world.path())
        assert world.repairer.repair(RUN, 5, found(world)) is None
        assert contents(world.path())[entry.file] == damaged[entry.file]


def test_both_that_vouch_are_damaged(world: CopiesWorld) -> None:
    """The catalog knows enough of the checkpoint to say whether the replica's are its own."""
    before = contents(world.path())
    (world.path() / naming.COMMIT).write_bytes(b"")
    (world.path() / naming.MANIFEST).unlink()
    assert world.repairer.repair(RUN, 5, found(world)) == "replica far"
    assert contents(world.path()) == before


def test_both_are_damaged_and_the_catalog_knows_another(world: CopiesWorld) -> None:
    """A replica of which nothing here vouches is not believed."""
    listed = world.catalog.checkpoint(RUN, 5)
    world.catalog.record_checkpoint(listed.model_copy(update={"created": "2026-02-02T00:00:00Z"}))
    (world.path() / naming.COMMIT).write_bytes(b"")
    (world.path() / naming.MANIFEST).unlink()
    assert world.repairer.repair(RUN, 5, found(world)) is None
    assert (world.path() / naming.COMMIT).read_bytes() == b""


def test_what_a_replica_has_that_cannot_be_read_now_is_told(world: CopiesWorld) -> None:
    """The root's copy was removed by hand: it is not unknown, and may be repaired once the replica can be reached."""
    shutil.rmtree(world.path())
    world.control.watch.relist(RUN)
    away = Repairer(world.control, dict)
    assert away.has_copy(RUN, 5)
    with pytest.raises(CheckpointsMissing, match=r"step 5 of tiny is not in the root, .* far, which has it"):
        away.restore(RUN, 5)
    assert world.repairer.restore(RUN, 5)["repaired"] and world.path().exists()


def test_what_is_gone_is_not_brought_back(world: CopiesWorld) -> None:
    """A checkpoint that was removed is no damage."""
    world.control.rotation.remove(RUN, 5, newest=True)
    with pytest.raises(NoSuchCheckpoint):
        world.repairer.run(RUN, 5)


def test_who_reads_meanwhile_keeps_the_old_file(world: CopiesWorld) -> None:
    """I4: an open file is never written into; its reader sees what was there."""
    entry = next(e for e in world.built[RUN, 5].manifest.tensors["model"].values() if e.nbytes)
    flip(world.path() / entry.file, entry.start)
    damaged = (world.path() / entry.file).read_bytes()
    with open(world.path() / entry.file, "rb") as held:
        assert world.repairer.repair(RUN, 5, found(world)) is not None
        assert held.read() == damaged


def open_files() -> int:
    """How many descriptors this process has, but for the catalog's: of those a thread more may take some for good."""
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            count += "catalog.sqlite" not in os.readlink(f"/proc/self/fd/{entry}")
    return count


def test_from_slots_that_are_still_held(tmp_path: Path) -> None:
    """The newest commit's bytes stand in shared memory: tensors and state come from there, with no replica."""
    root = tmp_path / "root"
    world = SaverWorld(PosixTier(root))
    try:
        ranks = world.launch(2)
        for rank in ranks:
            rank.save(1)
        assert {rank.wait(1).state for rank in ranks} == {"committed"}
        world.checked()  # who reads it back would find the damage too
        repairer = Repairer(world.control, dict, world.saver.holds.lend)
        directory = root / naming.checkpoint_path(SAVED, 1)
        before = contents(directory)
        descriptors = open_files()
        for name in ("model.safetensors", naming.STATE):
            flip(directory / name, len(before[name]) - 3)
            with pytest.raises(Damaged) as caught:
                verify(world.tier, naming.checkpoint_path(SAVED, 1))
            assert repairer.repair(SAVED, 1, caught.value) == "slot"
            assert contents(directory) == before
        wait_until(lambda: open_files() <= descriptors)  # others' threads come and go
        for rank in ranks:
            rank.save(2)
        assert {rank.wait(2).state for rank in ranks} == {"committed"}
        flip(directory / naming.STATE, 3)
        assert repairer.run(SAVED, 1).left is not None, "a step that is held no more has no source"
    finally:
        world.close()


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    """Of three checkpoints, the first and the third share the frozen file, and the second one has its own."""
    with saver_world(PosixTier(tmp_path / "root")) as world:
        training = Training(world, tmp_path / "root")
        training.save(1)
        training.save(2)
        control = world.control
        assert SecondCopier(control.store, control.second_copies, control.readers).run_once(SAVED) == [BASE_FILE]
        training.save(3)
        assert training.inode(1) == training.inode(3) != training.inode(2)
        yield training


def repaired(training: Training, step: int) -> list[tuple[int | None, object]]:
    """The step and the source of each repair that this one tells."""
    since = training.world.control.events.after(0, 100)[-1].id
    Repairer(training.world.control, dict).restore(SAVED, step)
    told = training.world.control.events.after(since, 100, kind="checkpoint-repaired")
    return [(event.step, event.detail["source"]) for event in told]


@pytest.mark.parametrize("step", [1, 3])
def test_a_shared_file_is_repaired_from_a_neighbour(training: Training, step: int) -> None:
    """In all checkpoints that have it, which share it as before; and the other one is not touched."""
    before, own = training.path(1).read_bytes(), training.inode(2)
    frozen_training.flip(training.path(3))
    assert repaired(training, step) == [(step, "step 2")]
    for sound in (1, 2, 3):
        assert training.is_whole(sound) and training.path(sound).read_bytes() == before
        assert repaired(training, sound) == []
    assert training.inode(1) == training.inode(3) and training.inode(2) == own
    assert training.world.tier.list(f"{SAVED}/{naming.STAGING}") == []


@pytest.mark.parametrize("way", ["cut", "gone"])
def test_a_shared_file_that_is_cut_or_gone(training: Training, way: str) -> None:
    """The other name of a deleted file is a neighbour's as well, and no other checkpoint gets the file."""
    if way == "cut":
        os.truncate(training.path(3), 100)
    else:
        training.save(4)  # the second one's file has several names then
        training.path(3).unlink()
    (told,) = repaired(training, 3)
    assert told in {(3, "step 2"), (3, "manifest, step 2")}
    assert all(training.is_whole(step) for step in training.world.control.store.steps(SAVED))


def test_a_neighbour_repairs_only_what_is_sound_in_it(training: Training) -> None:
    """Damaged at the same place, it has nothing to give, and no file changes; elsewhere, it has."""
    frozen_training.flip(training.path(3))
    frozen_training.flip(training.path(2))
    files = {step: (training.inode(step), training.path(step).read_bytes()) for step in (1, 2, 3)}
    for step in (1, 2, 3):
        with pytest.raises(CorruptExtent, match="no other copy"):
            repaired(training, step)
    assert {step: (training.inode(step), training.path(step).read_bytes()) for step in (1, 2, 3)} == files
    frozen_training.flip(training.path(2))
    frozen_training.flip(training.path(2), 30)  # in the header
    assert repaired(training, 3) == [(3, "step 2")]
    assert training.is_whole(1) and training.is_whole(3)


def test_a_neighbour_with_other_bytes_is_no_source(tmp_path: Path) -> None:
    """Its file has the same name and length."""
    with saver_world(PosixTier(tmp_path / "root")) as world:
        training = Training(world, tmp_path / "root")
        training.save(1)
        training.save(2, BASE_BYTES ^ 1)
        training.save(3, BASE_BYTES ^ 1)
        assert training.inode(2) == training.inode(3)
        for step in (1, 3):
            frozen_training.flip(training.path(step))
        for step in (1, 2, 3):
            with pytest.raises(CorruptExtent, match="no other copy"):
                repaired(training, step)


def test_files_that_are_alike_and_not_shared_are_no_source(tmp_path: Path) -> None:
    """Every file has one name: nothing says that the steps have the same bytes on purpose."""
    with saver_world(PosixTier(tmp_path / "root")) as world:
        training = Training(world, tmp_path / "root")
        training.save(1, frozen=False)
        training.save(2, frozen=False)
        frozen_training.flip(training.path(2))
        with pytest.raises(CorruptExtent, match="no other copy"):
            repaired(training, 2)
        assert training.is_whole(1)

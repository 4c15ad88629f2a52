"""Replicas: every verified checkpoint is copied, proven; copies go only after a removal; a bad disk there hurts nobody."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import delete

from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import AlreadyCommitted, CorruptExtent, Damaged, NoSpace, NoSuchCheckpoint, StorageFailed
from holdfast_formats.lineage import Intent, Rewind
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.staging.messages import CopyPlace
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.checkpoints.roots import load_manifest
from holdfast_service.control.control import Control
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow
from holdfast_service.control.launches.lineage_index import LineageIndex
from holdfast_service.control.launches.restore_choice import RestoreQuestion
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.copies import CopyStopped
from holdfast_service.daemon.copying.thinner import Thinner
from holdfast_service.storage import MemoryTier, PosixTier, stored_in
from tests.checkpoints import build, flip, varied_arrays
from tests.daemon.copies_world import RUN, CopiesWorld, contents, copies, copies_world
from tests.daemons import wait_until

STEPS = (5, 10, 15)


world = copies(STEPS)


def far(tmp_path: Path, step: int = 5) -> Path:
    return tmp_path / "far" / naming.checkpoint_path(RUN, step)


def forget(world: CopiesWorld, tmp_path: Path, *steps: int) -> None:
    """As if these steps had never been copied."""
    for step in steps:
        shutil.rmtree(far(tmp_path, step))
    with world.catalog.database.write() as session:
        session.execute(delete(ReplicaRow).where(ReplicaRow.step.in_(steps)))


def lose(world: CopiesWorld, how: str) -> None:
    """Take the newer checkpoints from the root, or a file of each."""
    for step in (10, 15):
        if how == "gone":
            shutil.rmtree(world.path(step))
        else:
            (world.path(step) / naming.STATE).unlink()


def test_every_verified_checkpoint_is_copied(world: CopiesWorld, tmp_path: Path) -> None:
    """Byte for byte, newest first; it is recorded and told, and nothing is behind any more."""
    assert len(world.records.due("far")) == 3
    world.replicators["far"].run_once()
    assert [world.states(step) for step in STEPS] == [{}, {}, {"far": "present"}]
    world.copy()
    for step in STEPS:
        assert contents(far(tmp_path, step)) == contents(world.path(step))
        assert world.states(step) == {"far": "present"}
    assert [detail["tier"] for detail in world.events("checkpoint-replicated")] == ["far"] * 3
    assert world.records.due("far") == []
    assert not os.listdir(tmp_path / "far" / RUN / naming.STAGING)


def test_what_is_not_verified_waits(tmp_path: Path) -> None:
    """A checkpoint that nobody has read back yet is not copied."""
    with copies_world(tmp_path, STEPS) as world:
        fresh = world.catalog.checkpoint(RUN, 15).model_copy(update={"verified": False})
        world.catalog.record_checkpoint(fresh)
        world.copy()
        assert [world.states(step) for step in STEPS] == [{"far": "present"}, {"far": "present"}, {}]


def test_a_copy_goes_after_its_checkpoint_was_removed(world: CopiesWorld, tmp_path: Path) -> None:
    """Removed here, removed there; a new checkpoint of the same step is copied again."""
    world.copy()
    world.control.rotation.remove(RUN, 10)
    assert world.states(10) == {"far": "gone"} and far(tmp_path, 10).exists()
    world.copy()
    assert world.states(10) == {} and not far(tmp_path, 10).exists()
    assert far(tmp_path, 5).exists() and far(tmp_path, 15).exists()
    build(world.path(10), varied_arrays(seed=4), run=RUN, step=10)
    world.control.recovery.recover()
    world.control.findings.sound(RUN, 10)
    world.copy()
    assert contents(far(tmp_path, 10)) == contents(world.path(10))


@pytest.mark.parametrize("at", [1, 4, "publish"])
def test_a_removal_in_the_middle_of_a_copy(world: CopiesWorld, tmp_path: Path, at: int | str) -> None:
    """It waits for no replica's disk, however far the copy is; what of the copy is left goes too."""
    acts: list[str] = []

    class Watched(PosixTier):
        def create(self, path: str, size: int) -> object:
            acts.append(path)
            if len(acts) == at:
                world.control.rotation.remove(RUN, 15, newest=True)
            return super().create(path, size)

        def publish(self, source: str, target: str) -> None:
            if at == "publish" and target == naming.checkpoint_path(RUN, 15):
                world.control.rotation.remove(RUN, 15, newest=True)
            super().publish(source, target)

    watched = world.add("watched", Watched(tmp_path / "watched"))
    while watched.run_once():
        pass
    assert sorted(os.listdir(tmp_path / "watched" / RUN / naming.CHECKPOINTS)) == [naming.step_directory(s) for s in (5, 10)]
    assert not os.listdir(tmp_path / "watched" / RUN / naming.STAGING)
    assert world.states(5) == {"watched": "present"}


def test_copies_outlive_a_lost_disk(world: CopiesWorld, tmp_path: Path) -> None:
    """A checkpoint that is gone without a removal keeps its copy, whatever the daemon then finds on an empty disk."""
    world.copy()
    shutil.rmtree(world.root / RUN)
    world.control.recovery.recover()
    assert world.catalog.run(RUN).checkpoints == 0
    world.replicators["far"]._opened = None  # as after a start
    world.copy()
    for step in STEPS:
        verify(PosixTier(tmp_path / "far"), naming.checkpoint_path(RUN, step))


@pytest.mark.parametrize("catalog_lost", [False, True])
def test_another_training_does_not_overwrite_them(world: CopiesWorld, tmp_path: Path, catalog_lost: bool) -> None:
    """A new checkpoint of a step whose copy is all that is left of a lost one is not copied over it, and that is told."""
    world.copy()
    before = contents(far(tmp_path, 15))
    shutil.rmtree(world.root / RUN)
    world.control.recovery.recover()
    if catalog_lost:
        with world.catalog.database.write() as session:
            session.execute(delete(ReplicaRow))
        world.records.opened("far", stored_in(PosixTier(tmp_path / "far")))
    build(world.path(15), varied_arrays(seed=9), run=RUN, step=15)
    made = load_manifest(world.tier, RUN, 15)
    encoded = manifests.encode(msgspec.structs.replace(made, created=utc_now()))
    (world.path(15) / naming.MANIFEST).write_bytes(encoded)
    (world.path(15) / naming.COMMIT).write_bytes(manifests.encode_commit(made, encoded))
    world.control.recovery.recover()
    world.control.findings.sound(RUN, 15)
    world.copy()
    assert contents(far(tmp_path, 15)) == before
    (told,) = world.events("replica-failed")
    assert told["problem"]["code"] == AlreadyCommitted.code
    assert len(world.records.due("far")) == 1


def test_a_copy_that_is_read_is_not_replaced_meanwhile(world: CopiesWorld, tmp_path: Path) -> None:
    """Training went back to step 10 and has saved step 15 again, while a launch still restores the copy of the other line by
    range: it reads all of it, and then the copy is replaced.
    """
    world.copy()
    before = contents(far(tmp_path, 15))
    world.control.readers.hold(RUN, 15, "attempt 1", 3600.0)
    shutil.rmtree(world.path(15))
    build(world.path(15), varied_arrays(seed=9), run=RUN, step=15)
    made = load_manifest(world.tier, RUN, 15)
    again = msgspec.structs.replace(made, created=utc_now(), attempt=2, turn=1, rewinds=(Rewind(2, 1, 10),))
    encoded = manifests.encode(again)
    (world.path(15) / naming.MANIFEST).write_bytes(encoded)
    (world.path(15) / naming.COMMIT).write_bytes(manifests.encode_commit(again, encoded))
    world.control.recovery.recover()
    world.control.findings.sound(RUN, 15)
    world.copy()
    assert contents(far(tmp_path, 15)) == before and not world.events("replica-failed")
    world.control.readers.release(RUN, 15, "attempt 1")
    world.replicators["far"].retry()
    world.copy()
    assert contents(far(tmp_path, 15)) == contents(world.path(15)) and world.states(15) == {"far": "present"}


def test_a_clock_that_was_set_back(world: CopiesWorld) -> None:
    """A checkpoint from the future is copied once, and not for ever."""
    made = load_manifest(world.tier, RUN, 15)
    encoded = manifests.encode(msgspec.structs.replace(made, created="2099-01-01T00:00:00.000Z"))
    (world.path(15) / naming.MANIFEST).write_bytes(encoded)
    (world.path(15) / naming.COMMIT).write_bytes(manifests.encode_commit(made, encoded))
    world.control.recovery.recover()
    world.control.findings.sound(RUN, 15)
    world.copy()
    assert world.records.due("far") == []


def test_a_restart_goes_on(world: CopiesWorld, tmp_path: Path) -> None:
    """What a crash left in staging is swept; what is there already is found and not copied again; rows are made anew."""
    world.replicators["far"].run_once()
    staging = tmp_path / "far" / naming.staging_path(RUN, 10, naming.NO_ATTEMPT)
    staging.mkdir(parents=True)
    (staging / "half").write_bytes(b"x")
    shutil.copytree(world.path(5), far(tmp_path, 5))  # published, but not recorded before the crash
    inode = os.stat(far(tmp_path, 5) / naming.COMMIT).st_ino
    world.replicators["far"]._opened = None
    world.copy()
    assert not staging.exists()
    assert [world.states(step) for step in STEPS] == [{"far": "present"}] * 3
    assert os.stat(far(tmp_path, 5) / naming.COMMIT).st_ino == inode
    assert world.records.stale("far", "0") is None, "it was read back, though nobody had copied it"


def test_a_damaged_checkpoint_is_not_copied(world: CopiesWorld, tmp_path: Path) -> None:
    """Nothing of it is published there; the damage is named, and the others are copied."""
    entry = next(e for e in world.built[RUN, 15].manifest.tensors["optim"].values() if e.nbytes)
    flip(world.path(15) / entry.file, entry.start)
    world.copy()
    assert not far(tmp_path, 15).exists() and world.states(15) == {"far": "copying"}
    (told,) = world.events("replica-failed")
    assert (told["problem"]["code"], told["problem"]["file"]) == (CorruptExtent.code, entry.file)
    assert world.states(5) == world.states(10) == {"far": "present"}


def test_what_arrives_damaged_is_not_published(world: CopiesWorld, tmp_path: Path) -> None:
    """A disk that stores other bytes than it was given is found out before COMMIT is written there."""

    class Lying(PosixTier):
        def read_stored(self, path: str, offset: int, buffer: object) -> int:
            done = super().read_stored(path, offset, buffer)
            if path.endswith("config.json"):
                buffer[3] ^= 1
            return done

    lying = world.add("lying", Lying(tmp_path / "lying"))
    while lying.run_once():
        pass
    assert not (tmp_path / "lying" / RUN / naming.CHECKPOINTS).exists()
    assert {world.states(step)["lying"] for step in STEPS} == {"copying"}


@pytest.mark.parametrize("error", [NoSpace("full", hint="free space"), StorageFailed("gone", hint="check it")])
def test_a_full_or_dead_disk_is_named_and_tried_again(tmp_path: Path, error: Exception) -> None:
    """The worker keeps going, its problem shows beside the lag, and it catches up when the disk works again."""
    with copies_world(tmp_path, STEPS, replicas=()) as world:
        tier = MemoryTier()
        sick = threading.Event()
        sick.set()

        class Sick:
            def __getattr__(self, name: str) -> object:
                if name == "create" and sick.is_set():
                    raise error
                return getattr(tier, name)

        one = world.add("sick", Sick())  # type: ignore[arg-type]
        one.start()
        try:
            wait_until(lambda: one.problem is not None)
            assert one.problem is error and world.states(15) == {"sick": "copying"}
            assert len(world.events("replica-failed")) == 1
            world.control.findings.sound(RUN, 5)  # nothing else notices
            sick.clear()
            one._closed.set()
        finally:
            one.close()
        again = world.add("sick", tier)
        while again.run_once():
            pass
        assert [world.states(step) for step in STEPS] == [{"sick": "present"}] * 3


@pytest.mark.parametrize("how", ["stopped", "away"])
def test_an_interrupted_copy_goes_on(world: CopiesWorld, tmp_path: Path, how: str) -> None:
    """In the middle of a file: nothing is under checkpoints/. The next start copies what is missing, or what is there with
    other bytes, and leaves nothing else.
    """
    created: list[str] = []
    far_away = tmp_path / "far" / RUN

    class Interrupted(PosixTier):
        last = 5

        def create(self, path: str, size: int) -> object:
            created.append(path.rpartition("/")[2])
            if len(created) > self.last and how == "away":
                raise StorageFailed("the disk is away")
            if len(created) > self.last:
                one._closed.set()
            return super().create(path, size)

    world.copy()
    forget(world, tmp_path, 15)
    one = world.add("far", Interrupted(tmp_path / "far"))
    with pytest.raises(CopyStopped if how == "stopped" else StorageFailed):
        one.run_once()
    assert naming.step_directory(15) not in os.listdir(far_away / naming.CHECKPOINTS)
    (left,) = (far_away / naming.STAGING).iterdir()
    wrong, whole = created[0], created[3]
    inode = os.stat(left / whole).st_ino
    flip(left / wrong, 0)
    created.clear()
    Interrupted.last = 100
    world.add("far", Interrupted(tmp_path / "far"))
    world.copy()
    assert contents(far(tmp_path, 15)) == contents(world.path(15)) and world.states(15) == {"far": "present"}
    assert whole not in created and wrong in created
    assert os.stat(far(tmp_path, 15) / whole).st_ino == inode
    assert not os.listdir(far_away / naming.STAGING)


@pytest.mark.parametrize("restarted", [False, True], ids=["same worker", "restarted"])
@pytest.mark.parametrize("how", ["removed", "thinned"])
def test_a_copy_that_is_no_longer_due(world: CopiesWorld, tmp_path: Path, how: str, restarted: bool) -> None:
    """Its checkpoint was removed, or replaced by a thinned one, in the meantime: what was staged is not gone on with, and
    goes.
    """
    staging = tmp_path / "far" / RUN / naming.STAGING

    class Away(PosixTier):
        is_away = False

        def create(self, path: str, size: int) -> object:
            if self.is_away and path.endswith(naming.STATE):
                raise StorageFailed("the disk is away")
            return super().create(path, size)

    world.copy()
    forget(world, tmp_path, 10)
    one = world.add("far", Away(tmp_path / "far"))
    Away.is_away = True
    with pytest.raises(StorageFailed):
        while one.run_once():
            pass
    assert len(os.listdir(staging)) == 1
    Away.is_away = False
    if how == "removed":
        world.control.rotation.remove(RUN, 10, newest=True)
    else:
        world.keep(keep_full=1)
        assert 10 in world.thinner().run_once(RUN)
        assert world.control.record_queue.recorded(30)
    if restarted:
        world.add("far", PosixTier(tmp_path / "far"))
    world.copy()
    assert far(tmp_path, 10).exists() == (how == "thinned") and not os.listdir(staging)


def test_a_damaged_copy_is_found_and_mended(world: CopiesWorld, tmp_path: Path) -> None:
    """Whoever was not read for longest is read back, and made from the checkpoint itself what it was."""
    world.copy()
    entry = next(e for e in world.built[RUN, 5].manifest.tensors["model"].values() if e.nbytes)
    flip(far(tmp_path) / entry.file, entry.start)
    (far(tmp_path) / naming.COMMIT).unlink()
    assert world.replicators["far"].check(RUN, 5) is None
    assert contents(far(tmp_path)) == contents(world.path()) and world.states(5) == {"far": "present"}
    assert {detail["file"] for detail in world.events("checkpoint-repaired")} == {entry.file, naming.COMMIT}
    assert {detail["replica"] for detail in world.events("checkpoint-repaired")} == {"far"}


def test_a_damaged_copy_of_a_damaged_checkpoint(world: CopiesWorld, tmp_path: Path) -> None:
    """What is damaged in both, and in all copies with the same bytes, stays damaged, and is listed so."""
    world.copy()
    entry = next(e for e in world.built[RUN, 5].manifest.tensors["model"].values() if e.nbytes)
    copied = {path.stat().st_ino: path for path in (far(tmp_path, step) / entry.file for step in STEPS)}
    for path in (*copied.values(), world.path() / entry.file):
        flip(path, entry.start)
    left = world.replicators["far"].check(RUN, 5)
    assert left is not None and left.members["file"] == entry.file
    assert world.states(5) == {"far": "damaged"}


def test_rows_come_from_the_directory(world: CopiesWorld, tmp_path: Path) -> None:
    """A catalog made anew lists the copies that are all there is; the others are read back, mended and made anew."""
    world.copy()
    (far(tmp_path, 5) / naming.MANIFEST).write_bytes(b"{}")
    shutil.rmtree(far(tmp_path, 10))
    with world.catalog.database.write() as session:
        session.execute(delete(ReplicaRow).where(ReplicaRow.step != 10))
    world.records.opened("far", stored_in(PosixTier(tmp_path / "far")))
    assert [world.states(step) for step in STEPS] == [{}, {}, {}]
    shutil.rmtree(world.path(15))
    world.control.recovery.recover()
    world.records.opened("far", stored_in(PosixTier(tmp_path / "far")))
    assert [world.states(step) for step in STEPS] == [{}, {}, {"far": "present"}]
    assert world.records.stale("far", "2000") == (RUN, 15), "nobody knows when it was read last"
    world.copy()
    assert [world.states(step) for step in STEPS] == [{"far": "present"}] * 3
    assert contents(far(tmp_path)) == contents(world.path())


def test_policy_and_pins_go_along(world: CopiesWorld, tmp_path: Path) -> None:
    """A replica that is served one day keeps what the run keeps."""
    world.control.rotation.mark(RUN, 5, lambda file: run_files.pinned(file, 5))
    world.copy()
    path = f"{RUN}/{naming.RUN_FILE}"
    assert (tmp_path / "far" / path).read_bytes() == (world.root / path).read_bytes()


def test_a_replica_that_several_nodes_were_given(tmp_path: Path) -> None:
    """Whoever has it copies there. One that has stood still, and has it no more, publishes nothing, tells nothing, and
    leaves what the other one has staged.
    """
    with copies_world(tmp_path, (5,)) as world:
        mine = [False]
        worker = world.add("far", PosixTier(tmp_path / "far"), lambda: mine[0])
        assert not worker.run_once() and worker.replica is None and world.states(5) == {}
        staging = tmp_path / "far" / RUN / naming.STAGING

        class Lost(PosixTier):
            def create(self, path: str, size: int) -> object:
                mine[0] = False
                return super().create(path, size)

        mine[0] = True
        worker = world.add("far", Lost(tmp_path / "far"), lambda: mine[0])  # type: ignore[arg-type]
        assert worker.run_once()
        assert not far(tmp_path).exists() and os.listdir(staging)
        assert world.states(5) == {"far": "copying"} and world.events("replica-failed") == []
        mine[0] = True
        world.add("far", PosixTier(tmp_path / "far"), lambda: mine[0])
        world.copy()
        assert world.states(5) == {"far": "present"} and contents(far(tmp_path)) == contents(world.path(5))


@pytest.mark.parametrize("how", ["gone", "lacks a file"])
def test_a_copy_stays_where_nothing_else_is_left(world: CopiesWorld, tmp_path: Path, how: str) -> None:
    """Its checkpoint was removed while newer ones stood. Then these were lost, before its storage could be reached."""
    world.copy()
    forget(world, tmp_path, 10, 15)
    world.control.rotation.remove(RUN, 5)
    lose(world, how)
    world.replicators["far"]._remove(world.replicators["far"]._open().store)
    assert far(tmp_path, 5).exists() and world.states(5) == {"far": "gone"}
    (told,) = world.events("removal-waits")
    assert told == {"tier": "far"}


def test_other_copies_are_looked_at_before_one_is_removed_because_of_them(world: CopiesWorld, tmp_path: Path) -> None:
    """The root has lost all newer ones, and their copies, which were there when they were made, each lack a file by now."""
    world.copy()
    world.control.rotation.remove(RUN, 5)
    for step in (10, 15):
        shutil.rmtree(world.path(step))
        (far(tmp_path, step) / naming.STATE).unlink()
    assert world.states(10) == world.states(15) == {"far": "present"}
    world.replicators["far"]._remove(world.replicators["far"]._open().store)
    assert far(tmp_path, 5).exists() and world.states(5) == {"far": "gone"}


@pytest.mark.parametrize("removed_by", ["policy", "request"])
def test_a_copy_that_retention_removes_stays_until_something_newer_stands(
    world: CopiesWorld, tmp_path: Path, removed_by: str
) -> None:
    """Step 10 went because 15 stood. Then that was lost: 5 is no reason to remove the copy of 10, unless a person has."""
    world.copy()
    if removed_by == "policy":
        world.control.rotation.mark(RUN, 5, lambda file: run_files.pinned(file, 5))
        world.control.rotation.set_policy(RUN, RetentionPolicy(last=1), "*")
        assert world.control.rotation.wait_until_applied() and not world.path(10).exists() and world.path(5).exists()
    else:
        world.control.rotation.remove(RUN, 10)
    forget(world, tmp_path, 15)
    lost = tmp_path / "lost"
    world.path(15).rename(lost)
    world.replicators["far"]._remove(world.replicators["far"]._open().store)
    assert far(tmp_path, 10).exists() == (removed_by == "policy")
    lost.rename(world.path(15))
    world.copy()
    assert not far(tmp_path, 10).exists() and far(tmp_path, 15).exists()


@pytest.mark.parametrize("how", ["gone", "lacks a file"])
def test_a_copy_stays_whole_where_nothing_newer_is_left(world: CopiesWorld, tmp_path: Path, how: str) -> None:
    """Its checkpoint was thinned because newer ones had an optimizer. These were lost before the copy was thinned, too."""
    world.copy()
    forget(world, tmp_path, 10, 15)
    world.control.rotation.set_policy(RUN, RetentionPolicy(keep_full=1), "*")
    assert world.control.rotation.wait_until_applied()
    assert 5 in Thinner(world.control.store, world.control.thinning).run_once(RUN)
    assert world.control.record_queue.recorded(30)
    lose(world, how)
    assert [one.step for one in world.records.due("far") if one.step == 5] == [5]
    world.replicators["far"]._copy(world.replicators["far"]._open(), world.catalog.checkpoint(RUN, 5))
    assert "optim" in load_manifest(PosixTier(tmp_path / "far"), RUN, 5).tensors
    (told,) = world.events("removal-waits")
    assert told == {"tier": "far"}


def test_a_copy_stays_while_what_was_brought_back_is_not_read_back(world: CopiesWorld, tmp_path: Path) -> None:
    """The run was deleted, and came back with a checkpoint that lacks a file: its copy is the only sound one."""
    world.copy()
    world.control.trash.delete(RUN)
    world.control.trash.undelete(RUN)
    world.control.findings.sound(RUN, 5)
    (world.path(15) / naming.STATE).unlink()
    world.copy()
    verify(PosixTier(tmp_path / "far"), naming.checkpoint_path(RUN, 15))
    assert world.states(5) == world.states(15) == {"far": "present"}


def test_a_run_that_comes_back_while_its_copies_are_removed(world: CopiesWorld, tmp_path: Path) -> None:
    """Copies that are still there stay, and the one that went is no longer counted: it is made again."""
    acts: list[str] = []

    class Watched(PosixTier):
        def remove_tree(self, path: str) -> None:
            if acts == ["deleted"]:
                acts.append("brought back")
                world.control.trash.undelete(RUN)
            super().remove_tree(path)

    watched = world.add("watched", Watched(tmp_path / "watched"))
    while watched.run_once():
        pass
    world.control.trash.delete(RUN)
    acts.append("deleted")
    watched._remove(watched._open().store)
    there = tmp_path / "watched" / RUN / naming.CHECKPOINTS
    assert acts == ["deleted", "brought back"] and len(os.listdir(there)) == 2
    assert [world.states(step) for step in (5, 10, 15)].count({"watched": "present"}) == 2
    for step in (5, 10, 15):
        world.control.findings.sound(RUN, step)
    while watched.run_once():
        pass
    for step in (5, 10, 15):
        verify(PosixTier(tmp_path / "watched"), naming.checkpoint_path(RUN, step))
        assert world.states(step) == {"watched": "present"}


@pytest.mark.parametrize("damaged", ["replacement", "replaced"])
def test_of_a_copy_and_what_it_replaced_the_sound_one_stays(world: CopiesWorld, tmp_path: Path, damaged: str) -> None:
    """A start finds both: the one that stands, if it is sound, else the one that it had replaced."""
    world.copy()
    aside = tmp_path / "far" / naming.replaced_path(RUN, 5)
    shutil.copytree(far(tmp_path), aside)
    kept = contents(far(tmp_path))
    shard = next((far(tmp_path) if damaged == "replacement" else aside).glob("model*.safetensors"))
    flip(shard, shard.stat().st_size - 1)
    world.replicators["far"]._opened = None  # as after a start
    world.replicators["far"].run_once()
    assert contents(far(tmp_path)) == kept and not aside.exists()


def test_a_node_whose_turn_is_over_lets_go(world: CopiesWorld) -> None:
    """Another node can copy there then, although only one may have it open."""
    mine, released = [True], []
    worker = world.replicators["far"]
    worker.is_mine, worker._release = lambda: mine[0], lambda: released.append(True)
    worker.run_once()
    assert worker.replica is not None and not released
    mine[0] = False
    assert not worker.run_once() and not worker.run_once()
    assert worker.replica is None and released == [True]


def test_what_continues_from_a_copy_is_on_its_line(world: CopiesWorld) -> None:
    """The root lacks the checkpoint: a launch that has restored it saves on the same line, also after a restart of the
    daemon, and no save waits for the replica, which may be silent.
    """
    asked: list[int] = []
    newest = load_manifest(world.tier, RUN, 15)
    rewound = msgspec.structs.replace(newest, attempt=2, turn=1, rewinds=(Rewind(2, 1, 10),))
    for path in (world.path(5), world.path(10), world.path(15)):
        shutil.rmtree(path)
    world.control.lineage_index.restored(rewound, 3)
    restarted = Control(world.control.storage, world.catalog)
    for control in (world.control, restarted):
        lineage_index = control.lineage_index
        lineage_index.copy_wanted.subscribe(lambda run, step, found: asked.append(step))
        for attempt, rewinds in ((3, (Rewind(2, 1, 10),)), (4, ())):
            assert lineage_index.place(RUN, 20, attempt, Intent(restored=15)).lineage.rewinds == rewinds
    lineage_index.add(msgspec.structs.replace(rewound, step=20, attempt=3, turn=0))
    assert lineage_index.place(RUN, 25, 3, Intent(restored=15)).lineage.rewinds == (Rewind(2, 1, 10),)
    assert not asked
    restarted.close()


def test_restores_are_told_where_copies_are(world: CopiesWorld, tmp_path: Path) -> None:
    """Those of replicas that were named, sound ones first; one from before the commit is another checkpoint's. What a rank
    met in a copy is read back next, and one that is newer and not restored is told with the reason.
    """
    copies, place = world.control.restores.copies, CopyPlace(name="replica far", at=str(tmp_path / "far"))
    world.copy()
    assert copies.of(RUN, 15) == ()
    copies.add("far", place)
    assert copies.of(RUN, 15) == (place,) and copies.of(RUN, 16) == ()
    world.control.lineage_index.copy_wanted.subscribe(
        lambda run, step, found: found.append(load_manifest(PosixTier(tmp_path / "far"), run, step))
    )
    world.control.attempts.saw(RUN, 1)
    assert copies.readable(RUN, 15, ("model",)) is not None and copies.readable(RUN, 15, ("absent",)) is None
    shutil.rmtree(world.path(15))
    world.control.watch.relist(RUN)
    assert copies.skipped(RUN, 10) == [
        "step 15 in replica far lacks groups that this restore needs: restored step 10 instead"
    ]
    told: list[tuple[int, str]] = []
    copies.suspected.subscribe(lambda run, step, replica, problem: told.append((step, replica)))
    copies.passed_over(RUN, 15, {"replica far": CorruptExtent("a flipped bit"), "another": CorruptExtent("what?")})
    assert told == [(15, "far")]
    world.records.suspected("far", CheckpointId(RUN, 15), CorruptExtent("a flipped bit"))
    assert copies.of(RUN, 15) == () and copies.of(RUN, 15, damaged=True) == (place,)
    assert copies.readable(RUN, 15, ("model",)) is None
    assert copies.skipped(RUN, 10) == ["step 15 in replica far is damaged (a flipped bit): restored step 10 instead"]
    world.copy()
    assert copies.of(RUN, 15) == (place,), "it was read back, and is sound"
    assert copies.hold(load_manifest(PosixTier(tmp_path / "far"), RUN, 15), "attempt 1", 9.0)
    assert 15 in world.control.readers.held(RUN)


def test_known_damage_in_the_root_does_not_delay_a_restore_with_a_copy(world: CopiesWorld, tmp_path: Path) -> None:
    """The step is answered at once and held, and is repaired behind the restore."""
    world.copy()
    restores = world.control.restores
    restores.copies.add("far", CopyPlace(name="replica far", at=str(tmp_path / "far")))
    world.control.lineage_index.copy_wanted.subscribe(
        lambda run, step, found: found.append(load_manifest(PosixTier(tmp_path / "far"), run, step))
    )
    waited: list[int] = []
    behind: list[tuple[int, Damaged | None]] = []
    restores.skipping.subscribe(lambda question, step, damage: waited.append(step))
    restores.copies.behind.subscribe(lambda run, step, damage: behind.append((step, damage)))
    world.control.findings.damaged(RUN, 15, CorruptExtent("a flipped bit"))
    shutil.rmtree(world.path(10))
    world.control.watch.relist(RUN)
    attempt = world.control.launches.declare(RUN, "launch", 1, None)
    assert restores.choose(RUN, attempt, 0, None, ()) == 15 and not waited
    assert restores.choose(RUN, attempt, 1, 10, ()) == 10 and not waited
    assert [(step, damage is None) for step, damage in behind] == [(15, False), (10, True)]
    assert 10 in world.control.readers.held(RUN)
    with pytest.raises(NoSuchCheckpoint, match="could not be copied back"):
        restores.choose(RUN, attempt, 1, 10, (), in_root=True)
    assert waited == [10]


def test_retention_decides_what_is_copied_back(world: CopiesWorld) -> None:
    """Not what it would remove at once."""
    verdicts, old = world.control.rotation.verdicts, load_manifest(world.tier, RUN, 5)
    shutil.rmtree(world.path(5))
    world.control.watch.relist(RUN)
    assert verdicts.keeps(old, abandoned=False)
    world.keep(last=1)
    assert not verdicts.keeps(old, abandoned=False)
    assert verdicts.keeps(msgspec.structs.replace(old, step=20), abandoned=False)


def test_a_newer_copy_is_restored_first(world: CopiesWorld, tmp_path: Path) -> None:
    """A root that was brought back from before a checkpoint takes that from the replica; one that retention or a rewind has
    left behind is not taken.
    """
    world.copy()
    shutil.rmtree(world.path(15))
    with world.catalog.database.write() as session:
        session.execute(delete(CheckpointRow).where(CheckpointRow.step == 15))  # the catalog is from before it, too
    restores, asked = world.control.restores, RestoreQuestion(RUN, 1, 0, None)
    world.control.lineage_index.copy_wanted.subscribe(
        lambda run, step, found: found.append(load_manifest(PosixTier(tmp_path / "far"), run, step))
    )
    assert restores._mendable(asked, ()) == (15, None) and restores._mendable(asked, (15,)) is None
    assert restores._mendable(asked._replace(step=15), ()) == (15, None)
    assert restores._mendable(asked._replace(step=10), ()) is None
    newest = load_manifest(world.tier, RUN, 10)
    rewound = msgspec.structs.replace(newest, step=12, attempt=2, turn=1, rewinds=(Rewind(2, 1, 10),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LineageIndex, "_there", lambda index, run: [newest, rewound])
        assert restores._mendable(asked, ()) is None, "training went back to step 10, and on from there"


def test_a_copy_of_an_unknown_line_is_not_taken_where_training_went_back(world: CopiesWorld, tmp_path: Path) -> None:
    """The root lacks all, and the newest copy cannot be read now: it may be of the line that was left. Once it can be read
    and is of that line, the newest one of the other line is taken.
    """
    world.copy()
    for step in (5, 10, 15):
        shutil.rmtree(world.path(step))
    world.control.watch.relist(RUN)
    away, far = {15}, PosixTier(tmp_path / "far")
    living = (Rewind(2, 1, 5),)

    def find(run: str, step: int, found: list[Manifest]) -> None:
        if step not in away:
            manifest = load_manifest(far, run, step)
            found.append(msgspec.structs.replace(manifest, attempt=2, turn=1, rewinds=living) if step == 10 else manifest)

    world.control.lineage_index.copy_wanted.subscribe(find)
    restores, asked = world.control.restores, RestoreQuestion(RUN, 3, 0, None)
    assert restores._mendable(asked, ()) == (15, None), "no line but one is known"
    world.control.attempts.saw_elsewhere(RUN, {2}, living)
    assert restores._mendable(asked, ()) is None
    away.clear()
    assert restores._mendable(asked, ()) == (10, None)

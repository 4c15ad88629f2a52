"""Old checkpoints are thinned to their weights: proven, at one stroke, without a copy; their replicas follow."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.read.root_directory import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, InUse, StorageFailed
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.retention.thinning import Thinning
from holdfast_service.daemon.copying import thinner as thinner_module
from holdfast_service.daemon.copying.thinner import Thinner
from holdfast_service.storage import PosixTier, posix
from tests.checkpoints import flip
from tests.daemon.copies_world import RUN, CopiesWorld, contents, copies
from tests.daemons import wait_until

STEPS = (5, 10, 15)


world = copies(STEPS)


def groups(world: CopiesWorld, step: int) -> set[str]:
    """The groups of what stands there, every byte of it proven; the catalog says the same."""
    assert world.control.record_queue.recorded(30)
    with open_checkpoint(world.root, None, RUN, step) as reader:
        assert reader.verify() == []
        made = reader.manifest
    listed = world.catalog.checkpoint(RUN, step)
    assert set(listed.groups) == set(made.groups) and listed.bytes == made.bytes
    assert (listed.thinned is None) == (made.thinned is None)
    return set(made.groups)


def test_older_ones_are_thinned(world: CopiesWorld) -> None:
    """Their weights are the same files; what was found out about them still holds; it is told what is free."""
    inode = os.stat(world.path(5) / "model-00001-of-00002.safetensors").st_ino
    before = world.catalog.checkpoint(RUN, 5)
    world.keep(keep_full=1)
    shown = world.control.rotation.verdicts.preview(RUN)
    assert [(v.step, v.keep, v.thin) for v in shown.verdicts] == [(15, True, False), (10, True, True), (5, True, True)]
    assert world.thinner().run_once(RUN) == [5, 10]
    assert [groups(world, step) for step in STEPS] == [{"model"}, {"model"}, {"model", "optim", "extra"}]
    assert os.stat(world.path(5) / "model-00001-of-00002.safetensors").st_ino == inode
    assert os.stat(world.path(5) / "model-00001-of-00002.safetensors").st_nlink == 1
    after = world.catalog.checkpoint(RUN, 5)
    assert after.verified and after.checked == before.checked and after.created == before.created
    assert after.thinned is not None and after.thinned.bytes == before.bytes
    told = world.events("checkpoint-thinned")
    assert [one["freed"] for one in told] == [before.bytes - after.bytes] * 2
    assert shown.bytes_thinned <= sum(one["freed"] for one in told) <= shown.bytes_thinned + 400
    assert world.control.rotation.verdicts.preview(RUN).bytes_saved == 2 * (before.bytes - after.bytes)
    assert world.leftovers() == [] and world.thinner().run_once(RUN) == []


def test_a_restart_lists_what_was_thinned_as_it_is(world: CopiesWorld) -> None:
    """The directory says it; nothing of what is known is lost, and the catalog agrees."""
    world.keep(keep_full=1)
    world.thinner().run_once(RUN)
    assert world.control.record_queue.recorded(30)
    before = [world.catalog.checkpoint(RUN, step) for step in STEPS]
    world.control.recovery.recover()
    assert [world.catalog.checkpoint(RUN, step) for step in STEPS] == before
    world.catalog.forget_checkpoint(RUN, 5)
    world.control.recovery.recover()
    assert world.catalog.checkpoint(RUN, 5).thinned == before[0].thinned


def test_what_a_lost_node_has_thinned_is_listed_by_the_next_one(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has replaced the checkpoint, and was lost before the catalog heard of it: whoever looks next, tells it."""
    world.keep(keep_full=2)
    with monkeypatch.context() as patched:
        patched.setattr(Thinning, "record", lambda self, run, step: self._rotation.replaced.listed(run, step))
        assert world.thinner().run_once(RUN) == [5] and world.control.record_queue.recorded(30)
    assert world.catalog.checkpoint(RUN, 5).thinned is None
    assert world.thinner().run_once(RUN) == []
    assert groups(world, 5) == {"model"} and world.catalog.checkpoint(RUN, 5).verified
    assert len(world.events("checkpoint-thinned")) == 1


def test_marks_and_readers_hold(world: CopiesWorld) -> None:
    """What is pinned, labelled or read stays whole, also if that begins at the last moment."""
    world.keep(keep_full=1)
    rotation = world.control.rotation
    rotation.mark(RUN, 5, lambda file: run_files.labelled(file, 5, "good"))
    with world.control.readers.reading(RUN, 10):
        assert world.thinner().run_once(RUN) == []
    publish = world.control.thinning.publish

    class Late:
        """Somebody pins it when all is staged."""

        due, clear = world.control.thinning.due, world.control.thinning.clear

        def publish(self, *parts: Any) -> Any:
            rotation.mark(RUN, 10, lambda file: run_files.pinned(file, 10))
            return publish(*parts)

    assert Thinner(world.control.store, Late()).run_once(RUN) == []
    assert [groups(world, step) for step in STEPS] == [{"model", "optim", "extra"}] * 3
    assert world.leftovers() == []


def test_what_somebody_else_put_there_stays(world: CopiesWorld) -> None:
    """A directory with files of others is left alone."""
    world.keep(keep_full=1)
    (world.path(10) / "notes.txt").write_text("mine")
    assert world.thinner().run_once(RUN) == [5]
    assert (world.path(10) / "notes.txt").read_text() == "mine"


def test_damaged_weights_stay_whole_and_are_reported(world: CopiesWorld) -> None:
    """What would stay is proven first; damage of what would go does not matter."""
    world.keep(keep_full=1)
    flip(world.path(5) / "model-00001-of-00002.safetensors", 4500)
    flip(world.path(10) / "optim-00001-of-00002.safetensors", 4500)
    reported: list[int] = []
    assert world.thinner(suspect=lambda run, step, error: reported.append(step)).run_once(RUN) == [10]
    assert reported == [5]
    assert world.catalog.checkpoint(RUN, 5).thinned is None


def test_one_that_was_saved_anew_is_not_touched(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands there is not what was staged."""
    world.keep(keep_full=1)
    thinning = world.control.thinning
    with pytest.raises(InUse, match="saved again"):
        thinning.publish(naming.job_place(RUN, 5, "1"), b"", b"", b"another COMMIT", None)


def test_without_second_names_it_is_copied(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links; proven on both sides."""

    def lacking(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(posix, "_link", lacking)
    world.keep(keep_full=1)
    assert world.thinner().run_once(RUN) == [5, 10]
    assert [groups(world, step) for step in STEPS] == [{"model"}, {"model"}, {"model", "optim", "extra"}]


def test_another_node_does_it(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is one node's duty; one that lost it publishes nothing more."""
    world.keep(keep_full=1)
    thinning: Thinning = world.control.thinning
    monkeypatch.setattr(thinning, "_is_mine", lambda: False)
    assert world.thinner().run_once(RUN) == []
    answers = iter([True, False])
    monkeypatch.setattr(thinning, "_is_mine", lambda: next(answers))
    with pytest.raises(StopIteration):
        world.thinner().run_once(RUN)
    assert groups(world, 5) == {"model", "optim", "extra"}


def test_a_failing_disk_leaves_it_whole(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays in staging, and the next look succeeds."""
    world.keep(keep_full=2)

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    worker = world.thinner()
    with monkeypatch.context() as patch:
        patch.setattr(posix, "_link", failing)
        assert worker.run_once(RUN) == worker.run_once(RUN) == []
    assert groups(world, 5) == {"model", "optim", "extra"} and world.leftovers() == []
    told = world.control.events.after(0, 100, kind="thinning-failed")
    assert [(one.step, one.level, one.detail["problem"]["code"]) for one in told] == [(5, "warning", "storage-failed")]
    assert "Input/output error" in told[0].text and told[0].detail["problem"]["hint"] in told[0].text
    assert worker.run_once(RUN) == [5]


def test_a_bad_sector_keeps_no_other_back(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest one cannot be read: what comes after it is thinned all the same."""
    world.keep(keep_full=1)
    read = PosixTier.read_stored

    def broken(tier: PosixTier, path: str, *more: Any) -> int:
        if path.startswith(naming.checkpoint_path(RUN, 5)):
            raise StorageFailed(f"{path} cannot be read", hint="check the disk")
        return read(tier, path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(PosixTier, "read_stored", broken)
        assert world.thinner().run_once(RUN) == [10]
    assert [groups(world, step) for step in STEPS[:2]] == [{"model", "optim", "extra"}, {"model"}]


def test_copies_follow(world: CopiesWorld, tmp_path: Path) -> None:
    """A replica's copy is thinned in its place, with its own files; one that is made later is thin at once."""
    world.copy()
    there = tmp_path / "far" / naming.checkpoint_path(RUN, 5)
    inode = os.stat(there / "model-00001-of-00002.safetensors").st_ino
    world.keep(keep_full=1)
    world.thinner().run_once(RUN)
    assert world.control.record_queue.recorded(30)
    world.copy()
    assert contents(there) == contents(world.path(5))
    assert os.stat(there / "model-00001-of-00002.safetensors").st_ino == inode
    assert world.states(5) == {"far": "present"} and world.records.due("far") == []
    assert not os.listdir(tmp_path / "far" / RUN / naming.STAGING)
    world.add("late", PosixTier(tmp_path / "late"))
    world.copy("late")
    assert contents(tmp_path / "late" / naming.checkpoint_path(RUN, 5)) == contents(world.path(5))


def test_a_catalog_that_was_away_is_asked_again(world: CopiesWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the worker was told of the run nobody could say what is due; nobody tells it again."""
    world.keep(keep_full=1)
    monkeypatch.setattr(thinner_module, "AGAIN_S", 0.05)
    thinning, due = world.control.thinning, Thinning.due
    asked = iter(range(2))

    def away(self: Thinning, run: str) -> Any:
        if next(asked, None) is not None:
            raise CatalogUnavailable("the catalog does not answer")
        return due(self, run)

    monkeypatch.setattr(Thinning, "due", away)
    worker = Thinner(world.control.store, thinning).worker
    worker.due(RUN)
    wait_until(lambda: all(world.catalog.checkpoint(RUN, step).thinned is not None for step in (5, 10)))
    worker.close()


def test_the_thread_does_what_is_due(world: CopiesWorld) -> None:
    """It is told of a run when the run's policy was applied."""
    worker = world.thinner().worker
    world.control.rotation.applied.subscribe(worker.due)
    world.keep(keep_full=1)
    assert worker.settle()
    worker.close()
    worker.due(RUN)
    assert groups(world, 5) == {"model"}
    state = json.loads((world.path(5) / naming.STATE).read_bytes())
    assert state["groups"] == {"model": {}}


def test_weights_read_while_it_is_thinned(world: CopiesWorld) -> None:
    """A reader that has opened the directory before goes on reading the weights."""
    world.keep(keep_full=1)
    with open_checkpoint(world.root, None, RUN, 5) as reader:
        world.thinner().run_once(RUN)
        expected = world.built[RUN, 5].arrays["model"]["layers.0.q.weight"]
        assert np.array_equal(reader.read("model", "layers.0.q.weight"), expected)

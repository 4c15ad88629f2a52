"""A file that several checkpoints have counts once: for the run, its quota and what a removal frees."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.retention.admission import SPARE_BYTES
from holdfast_service.daemon.copying.second_copier import SecondCopier
from holdfast_service.storage import PosixTier
from tests.daemon.frozen_training import BASE_BYTES, Training
from tests.daemon.saver_world import RUN, saver_world


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with saver_world(PosixTier(tmp_path / "root")) as world:
        yield Training(world, tmp_path / "root")


def shared(training: Training) -> list[int]:
    assert training.world.control.record_queue.flush()
    return [one.shared_bytes for one in reversed(training.world.catalog.checkpoints(RUN, None, 100).items)]


def on_disk(training: Training) -> int:
    """What `du` says, but for COMMIT and manifests."""
    files = {file.stat().st_ino: file for step in training.path(1).parent.parent.iterdir() for file in step.iterdir()}
    return sum(file.stat().st_size for file in files.values() if file.name not in ("COMMIT", "manifest.json"))


def occupied(training: Training) -> int:
    assert training.world.control.record_queue.flush()
    return training.world.catalog.run(RUN).bytes


def preview(training: Training, **rules: Any) -> Any:
    return training.world.control.rotation.verdicts.preview(RUN, RetentionPolicy(**rules))


def test_a_shared_file_counts_once_for_the_oldest(training: Training) -> None:
    """Whichever of its checkpoints is removed, by Holdfast or by hand; sums of the catalog are those of the disk."""
    for step in (1, 2, 3):
        training.save(step)
    base = training.path(1).stat().st_size
    assert shared(training) == [0, base, base] and occupied(training) == on_disk(training)
    training.world.control.rotation.remove(RUN, 1)
    assert shared(training) == [0, base] and occupied(training) == training.world.catalog.checkpoint(RUN, 2).bytes * 2 - base
    shutil.rmtree(training.path(2).parent)
    training.world.control.watch.relist(RUN)
    assert shared(training) == [0]


def test_a_shared_file_that_was_cut_short_counts_once_all_the_same(training: Training) -> None:
    """By hand, under all its names. Else a quota would refuse saves for bytes that are not on the disk."""
    for step in (1, 2, 3):
        training.save(step)
    before = shared(training)
    os.truncate(training.path(3), 1000)
    training.world.control.watch.relist(RUN)
    training.save(4)
    assert shared(training)[:3] == before


def test_a_catalog_that_is_made_again(training: Training) -> None:
    """From the directories alone; a copy of the root by `cp -r` shares nothing, and says so."""
    for step in (1, 2):
        training.save(step)
    expected = shared(training)
    for step in (1, 2):
        training.world.catalog.forget_checkpoint(RUN, step)
    assert not roots.reconcile(training.world.control.store, training.world.catalog)
    assert shared(training) == expected
    own = training.path(2).read_bytes()
    training.path(2).unlink()
    training.path(2).write_bytes(own)
    training.path(2, "COMMIT").touch()
    roots.reconcile(training.world.control.store, training.world.catalog)
    assert shared(training) == [0, 0]


def test_a_second_copy_counts(training: Training) -> None:
    """From then on, both files do."""
    training.save(1)
    training.save(2)
    control = training.world.control
    SecondCopier(control.store, control.second_copies, control.readers).run_once(RUN)
    assert shared(training) == [0, 0]
    training.save(3)
    assert shared(training) == [0, 0, training.path(1).stat().st_size] and occupied(training) == on_disk(training)


def test_a_quota_counts_what_is_written(training: Training) -> None:
    """Ten checkpoints of one base fit a quota of less than two; a base that changes does not."""
    training.save(1)
    training.world.control.rotation.set_policy(
        RUN, RetentionPolicy(quota_bytes=training.path(1).stat().st_size * 3 // 2), "*"
    )
    for step in range(2, 11):
        training.save(step)
    assert training.world.control.rotation.wait_until_applied()
    assert training.world.control.store.steps(RUN) == [*range(1, 11)]


def test_a_disk_without_room_for_the_base_again(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken has its room; a base that changes is refused before it is written, and the disk's size is named."""
    training.save(1)
    room = SPARE_BYTES + training.path(1).stat().st_size // 2
    monkeypatch.setattr(PosixTier, "free_bytes", lambda tier: room)
    assert training.save(2)["linked_bytes"] and training.is_whole(2)
    with pytest.raises(AssertionError):
        training.save(3, BASE_BYTES[::-1].copy())
    problem = training.rank.wait(3).problem
    assert problem is not None and problem["code"] == "no-space" and problem["free"] == room
    assert training.world.control.store.steps(RUN) == [1, 2]


def test_a_preview_says_what_a_removal_frees(training: Training) -> None:
    """The base stays as long as one of its checkpoints does."""
    for step in range(1, 5):
        training.save(step)
    whole, base = training.world.catalog.checkpoint(RUN, 1).bytes, training.path(1).stat().st_size
    found = preview(training, last=1)
    assert (found.bytes_kept, found.bytes_removed) == (whole, 3 * (whole - base))
    before = on_disk(training)
    training.world.control.rotation.set_policy(RUN, RetentionPolicy(last=1), "*")
    assert training.world.control.rotation.wait_until_applied()
    left = {file.stat().st_ino: file for file in training.path(4).parent.iterdir()}
    now = sum(file.stat().st_size for file in left.values() if file.name not in ("COMMIT", "manifest.json"))
    assert before - now == found.bytes_removed and occupied(training) == found.bytes_kept


def test_room_is_made_by_what_is_really_freed(training: Training) -> None:
    """Removing checkpoints that share all but a little frees little: it goes on until the save fits, or refuses it."""
    training.save(1)
    for step in (2, 3, 4):
        training.save(step)
    whole, base = training.world.catalog.checkpoint(RUN, 1).bytes, training.path(1).stat().st_size
    small = whole - base
    training.world.control.rotation.set_policy(RUN, RetentionPolicy(last=2, quota_bytes=whole + 2 * small), "*")
    assert training.world.control.rotation.wait_until_applied()
    training.save(5)
    assert occupied(training) <= whole + 2 * small
    assert training.world.control.store.steps(RUN) == [4, 5] and training.is_whole(5)

"""Files of frozen tensors: taken from a verified checkpoint when every digest is the same, and written otherwise."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CorruptExtent
from holdfast_formats.lineage import Intent
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.writing import unchanged_files
from holdfast_service.storage import PosixTier, posix
from tests.daemon.copying.test_jobs_on_objects import sent, stored
from tests.daemon.frozen_training import ADAPTER_FILE, BASE, BASE_BYTES, BASE_FILE, Training, flip
from tests.daemon.saver_world import RUN, saver_world
from tests.kit.memory_bucket import MemoryBucket


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with saver_world(PosixTier(tmp_path / "root")) as world:
        yield Training(world, tmp_path / "root")


def test_an_unchanged_file_is_not_written_again(training: Training) -> None:
    """It is one file under two names; the save states how much it did not write, and what changed has a file of its own."""
    first, second = training.save(1), training.save(2)
    assert training.inode(1) == training.inode(2)
    assert training.path(1, ADAPTER_FILE).stat().st_ino != training.path(2, ADAPTER_FILE).stat().st_ino
    assert "linked_bytes" not in first
    assert second["linked_bytes"] == training.path(2).stat().st_size
    assert training.is_whole(1) and training.is_whole(2)


@pytest.mark.parametrize("at", [0, BASE // 2, BASE - 1])
def test_one_changed_byte_is_written(training: Training, at: int) -> None:
    """That the tensor is expected to stay decides nothing."""
    training.save(1)
    changed = BASE_BYTES.copy()
    changed[at] ^= 1
    assert "linked_bytes" not in training.save(2, changed)
    assert training.is_whole(1) and training.is_whole(2, changed)
    assert training.inode(1) != training.inode(2)


def test_what_is_not_frozen_is_written(training: Training) -> None:
    """The same bytes, but the state says that they may change: nothing is digested before it is written."""
    training.save(1, frozen=False)
    assert "linked_bytes" not in training.save(2, frozen=False)
    assert training.inode(1) != training.inode(2)


def test_a_checkpoint_that_was_not_read_back_is_no_source(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its bytes are known to be on the disk, a later save writes its own."""
    monkeypatch.setattr(training.world.saver.checks, "add", lambda manifest, written=(): None)
    training.save(1, read_back=False)
    training.save(2, read_back=False)
    assert training.inode(1) != training.inode(2)


def test_a_file_that_was_edited_is_no_source(training: Training) -> None:
    """Its size is right and the catalog calls it verified, but it is not the file that was read back."""
    training.save(1)
    with training.path(1).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\0")
    os.utime(training.path(1), ns=(1, 1))
    training.save(2)
    assert training.inode(1) != training.inode(2) and training.is_whole(2)


def test_a_file_that_a_damaged_checkpoint_has_too_is_no_source(training: Training) -> None:
    """Others of its checkpoints are called verified still: they are looked at, and nothing is taken from them meanwhile."""
    for step in (1, 2):
        training.save(step)
    flip(training.path(2), -1)
    assert training.world.control.findings.damaged_steps(RUN) == []
    told: list[int] = []
    training.world.control.watch.suspected.subscribe(lambda run, step, error: told.append(step))
    training.world.saver.checks.suspect(RUN, 2, CorruptExtent("it is damaged", file=BASE_FILE))
    training.world.checked()
    assert told == [1] and training.world.control.findings.damaged_steps(RUN) == [2]
    training.save(3)
    assert training.is_whole(3) and training.inode(3) != training.inode(2)


def test_removed_checkpoints_leave_the_others_whole(training: Training) -> None:
    """The first one by hand, with all its files, the second one through the service."""
    for step in (1, 2, 3):
        training.save(step)
    for file in training.path(1).parent.iterdir():
        file.unlink()
    training.path(1).parent.rmdir()
    training.world.control.rotation.remove(RUN, 2)
    assert training.is_whole(3)
    training.save(4)
    assert training.is_whole(4)


def test_a_source_that_goes_at_this_moment(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the comparison and the second name: the save writes its file."""
    training.save(1)
    compared = unchanged_files._as_stated

    def then_removed(*arguments: Any) -> Any:
        extents = compared(*arguments)
        training.world.control.rotation.remove(RUN, 1, newest=True)
        return extents

    monkeypatch.setattr(unchanged_files, "_as_stated", then_removed)
    assert "linked_bytes" not in training.save(2)
    assert training.is_whole(2)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EMLINK, errno.EXDEV, errno.EIO, errno.ENOSPC])
def test_a_root_that_gives_no_second_names(training: Training, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """FAT, some network file systems, too many names, a failing disk: the file is written as it would have been."""

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(error, os.strerror(error))

    training.save(1)
    monkeypatch.setattr(posix, "_link", refuse)
    for step in (2, 3):
        assert "linked_bytes" not in training.save(step)
        assert training.is_whole(step)


def test_after_a_restart_of_both_sides(tmp_path: Path) -> None:
    """Another daemon and another launch go on with the same file, once that is verified in the catalog."""
    with saver_world(PosixTier(tmp_path / "root")) as world:
        Training(world, tmp_path / "root").save(1)
    with saver_world(PosixTier(tmp_path / "root")) as world:
        world.control.recovery.recover()
        world.control.findings.sound(RUN, 1)
        training = Training(world, tmp_path / "root")
        training.save(2, intent=Intent(restored=1))
        assert training.inode(1) == training.inode(2) and training.is_whole(2)


def test_a_bucket_copies_the_file_itself(tmp_path: Path) -> None:
    """Nothing of it is sent, and each checkpoint has an object of its own, which outlives the other."""
    bucket = MemoryBucket()
    with saver_world(storage=stored(bucket)) as world:
        training = Training(world, tmp_path)
        training.save(1)
        begin = len(bucket.requests)
        assert training.save(2)["linked_bytes"] > BASE
        assert sent(bucket, begin, BASE_FILE) == [] and sent(bucket, begin, ADAPTER_FILE) != []
        assert world.catalog.checkpoint(RUN, 2).shared_bytes == 0
        world.control.rotation.remove(RUN, 1)
        made = verify(world.control.records, naming.checkpoint_path(RUN, 2))
        assert made.step == 2

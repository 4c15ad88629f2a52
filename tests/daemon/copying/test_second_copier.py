"""Second copies: after one of them, no two neighbouring checkpoints share a file on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_formats.errors import Damaged
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying import second_copier
from holdfast_service.daemon.copying.copies import CopyStopped
from holdfast_service.daemon.copying.second_copier import SecondCopier
from holdfast_service.storage import PosixTier, posix
from tests.daemon.frozen_training import BASE_BYTES, BASE_FILE, Training, flip
from tests.daemon.saver_world import RUN, saver_world


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with saver_world(PosixTier(tmp_path / "root")) as world:
        yield Training(world, tmp_path / "root")


def copier(training: Training, **parts: Any) -> SecondCopier:
    control = training.world.control
    return SecondCopier(control.store, control.second_copies, control.readers, **parts)


def keep(training: Training, **rules: Any) -> None:
    training.world.control.rotation.set_policy(RUN, RetentionPolicy(**rules), "*")
    assert training.world.control.rotation.wait_until_applied()


def events(training: Training, kind: str) -> list[int | None]:
    return [event.step for event in training.world.control.events.after(0, 100, kind=kind)]


def leftovers(training: Training) -> list[str]:
    return [name for room in (naming.STAGING, naming.TRASH) for name in training.world.tier.list(f"{RUN}/{room}")]


def test_neighbours_never_share_a_file_again(training: Training) -> None:
    """One copy is made; later saves take the file that is not the newest one's, and no bytes are written for it."""
    training.save(1)
    training.save(2)
    worker = copier(training)
    assert worker.run_once(RUN) == [BASE_FILE]
    assert events(training, "second-copy-made") == [2]
    for step in range(3, 7):
        assert training.save(step)["linked_bytes"] == training.path(step).stat().st_size
        assert worker.run_once(RUN) == []
    inodes = [training.inode(step) for step in range(1, 7)]
    assert len(set(inodes)) == 2 and all(a != b for a, b in pairwise(inodes))
    assert leftovers(training) == []
    for step in range(1, 7):
        assert training.is_whole(step) and training.world.catalog.checkpoint(RUN, step).verified


def test_one_flipped_bit_leaves_every_other_checkpoint(training: Training) -> None:
    """In each of the two files on the disk."""
    training.save(1)
    training.save(2)
    copier(training).run_once(RUN)
    training.save(3)
    training.save(4)
    flip(training.path(3))
    for step, sound in ((1, False), (2, True), (3, False), (4, True)):
        if sound:
            assert training.is_whole(step)
        else:
            with pytest.raises(Damaged):
                verify(training.world.tier, naming.checkpoint_path(RUN, step))


def test_the_checkpoint_stays_verified(training: Training) -> None:
    """It was verified as other files: a removal that looks at the storage must not doubt it now."""
    training.save(1)
    training.save(2)
    copier(training).run_once(RUN)
    keep(training, last=1)
    assert training.world.control.store.steps(RUN) == [2]
    assert training.world.catalog.checkpoint(RUN, 2).verified and training.is_whole(2)


def test_a_run_that_keeps_one_checkpoint_pays_for_no_copy(training: Training) -> None:
    """Also where the older one is still being read, and goes later."""
    training.save(1)
    control = training.world.control
    with control.readers.reading(RUN, 1):
        keep(training, last=1)
        training.save(2)
        assert control.store.steps(RUN) == [1, 2]
        assert copier(training).run_once(RUN) == []
    training.save(3)
    assert control.rotation.wait_until_applied()
    assert copier(training).run_once(RUN) == [] and control.store.steps(RUN) == [3]
    assert training.path(3).stat().st_nlink == 1


def test_nothing_is_copied_before_both_are_verified(training: Training) -> None:
    """What is not read back may be damaged, and a copy of it helps nobody."""
    training.save(1)
    training.save(2)
    training.world.control.findings.damaged(RUN, 1, Damaged("it is"))
    assert copier(training).run_once(RUN) == []


def test_a_damaged_file_is_not_copied(training: Training) -> None:
    """The damage is told, and nothing takes the file's place."""
    training.save(1)
    training.save(2)
    flip(training.path(2))
    told: list[int] = []
    assert copier(training, suspect=lambda run, step, error: told.append(step)).run_once(RUN) == []
    assert told == [2] and training.inode(1) == training.inode(2) and leftovers(training) == []


def test_a_step_that_is_saved_again_gets_no_old_file(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is of another checkpoint then."""
    training.save(1)
    training.save(2)
    changed = np.zeros_like(BASE_BYTES)
    carried = second_copier.carry

    def then_saved_again(*arguments: Any) -> None:
        carried(*arguments)
        commit = training.path(2, naming.COMMIT)
        commit.write_bytes(training.path(1, naming.COMMIT).read_bytes())

    monkeypatch.setattr(second_copier, "carry", then_saved_again)
    inode = training.inode(2)
    assert changed.size and copier(training).run_once(RUN) == []
    assert training.inode(2) == inode and leftovers(training) == []


def test_a_save_that_waits_for_the_step_stops_the_copy(training: Training) -> None:
    """It takes the checkpoint's place, and must not wait for gigabytes."""
    training.save(1)
    training.save(2)
    with training.world.control.readers.awaited(RUN, 2):
        assert copier(training).run_once(RUN) == []  # it does not begin
    worker = copier(training)
    worker.worker.close()
    with pytest.raises(CopyStopped):
        worker.run_once(RUN)
    assert leftovers(training) == [] and training.inode(1) == training.inode(2)


@pytest.mark.parametrize("cause", ["quota", "disk", "write"])
def test_no_room_is_told_once_and_tried_again(training: Training, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    """Saves go on with the shared file; nothing is removed for the copy."""
    training.save(1)
    training.save(2)
    if cause == "quota":
        keep(training, quota_bytes=training.path(1).stat().st_size * 3 // 2)
    if cause == "disk":
        monkeypatch.setattr(PosixTier, "free_bytes", lambda tier: 2**20)
    if cause == "write":

        def refuse(*arguments: Any) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(posix, "_fsync", refuse)
    worker = copier(training)
    assert worker.run_once(RUN) == worker.run_once(RUN) == []
    monkeypatch.undo()
    assert events(training, "second-copy-failed") == [2]
    assert training.inode(1) == training.inode(2)
    keep(training)
    assert worker.run_once(RUN) == [BASE_FILE] and leftovers(training) == []

"""Copies of a renamed run: there is one at every moment, under the old name or the new one, and no byte is copied for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_service.control.checkpoints.replicas import listed
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage import PosixTier
from tests.checkpoints import flip
from tests.daemon.copies_world import RUN, CopiesWorld, contents, copies

STEPS = (5, 10, 15)
NEW, NEWER = "another", "a-third"


world = copies(STEPS, copied=True)


def at(tmp_path: Path, run: str, step: int) -> Path:
    return tmp_path / "far" / naming.checkpoint_path(run, step)


def names(tmp_path: Path, step: int) -> list[str]:
    """The runs under which a copy of a step stands."""
    return [run for run in (RUN, NEW, NEWER) if (at(tmp_path, run, step) / naming.COMMIT).exists()]


def states(world: CopiesWorld, run: str, step: int) -> dict[str, str]:
    return {replica.tier: replica.state for replica in listed(world.catalog.database, run, step)}


def inodes(tmp_path: Path, run: str) -> dict[str, int]:
    found = (path for step in STEPS for path in at(tmp_path, run, step).glob("*.safetensors"))
    return {f"{path.parent.name}/{path.name}": path.stat().st_ino for path in found}


def test_there_is_a_copy_at_every_moment(world: CopiesWorld, tmp_path: Path) -> None:
    """Each gets its new name before the old one goes; the files are the same ones, and what they are is the root's."""
    before = inodes(tmp_path, RUN)
    world.control.renaming.rename(RUN, NEW)
    assert world.records.removals("far") == []
    seen = set()
    while world.replicators["far"].run_once():
        there = [names(tmp_path, step) for step in STEPS]
        assert all(there), there
        seen |= {tuple(one) for one in there}
    assert seen == {(RUN,), (RUN, NEW), (NEW,)}
    for step in STEPS:
        assert contents(at(tmp_path, NEW, step)) == contents(world.root / naming.checkpoint_path(NEW, step))
        assert (states(world, RUN, step), states(world, NEW, step)) == ({}, {"far": "present"})
    assert before and inodes(tmp_path, NEW) == before
    assert not os.listdir(tmp_path / "far" / NEW / naming.STAGING) and RUN not in world.catalog.known_runs()


def test_renamed_twice_before_the_replica_was_looked_at(world: CopiesWorld, tmp_path: Path) -> None:
    """The copies get the name that their run has then."""
    world.control.renaming.rename(RUN, NEW)
    world.replicators["far"].run_once()
    world.control.renaming.rename(NEW, NEWER)
    world.copy()
    assert [names(tmp_path, step) for step in STEPS] == [[NEWER]] * 3
    assert [states(world, NEWER, step) for step in STEPS] == [{"far": "present"}] * 3


def test_storage_without_second_names_has_another_copy_first(
    world: CopiesWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made from the copy that is there, and verified."""
    world.control.renaming.rename(RUN, NEW)
    monkeypatch.setattr(PosixTier, "link", lambda self, source, target: False)
    while world.replicators["far"].run_once():
        assert all(names(tmp_path, step) for step in STEPS)
    for step in STEPS:
        verify(PosixTier(tmp_path / "far"), naming.checkpoint_path(NEW, step))
        assert names(tmp_path, step) == [NEW]


def test_a_damaged_copy_is_made_anew(world: CopiesWorld, tmp_path: Path) -> None:
    """What cannot be proven gets no new name; the root's bytes do, and the damaged copy goes after that."""
    world.control.renaming.rename(RUN, NEW)
    flip(next(at(tmp_path, RUN, 5).glob("model*.safetensors")), 4096)
    world.copy()
    verify(PosixTier(tmp_path / "far"), naming.checkpoint_path(NEW, 5))
    assert [names(tmp_path, step) for step in STEPS] == [[NEW]] * 3


def test_a_checkpoint_that_was_damaged_meanwhile_keeps_its_copy(world: CopiesWorld, tmp_path: Path) -> None:
    """Nothing sound can be copied from the root: the copy that is there gets the new name, and repairs."""
    world.control.renaming.rename(RUN, NEW)
    os.truncate(world.root / naming.checkpoint_path(NEW, 10) / naming.MANIFEST, 10)
    world.copy()
    assert [names(tmp_path, step) for step in STEPS] == [[NEW]] * 3
    verify(PosixTier(tmp_path / "far"), naming.checkpoint_path(NEW, 10))


def test_what_is_removed_under_its_new_name_loses_both(world: CopiesWorld, tmp_path: Path) -> None:
    """A removal is one, whether the copy has its new name already or not."""
    world.control.renaming.rename(RUN, NEW)
    world.control.rotation.remove(NEW, 5)
    world.copy()
    assert [names(tmp_path, step) for step in STEPS] == [[], [NEW], [NEW]]

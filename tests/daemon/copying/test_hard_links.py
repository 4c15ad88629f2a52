"""Unchanged files in a replica: one on the disk for several copies, but never for all of them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from holdfast_formats import naming
from holdfast_formats.errors import Damaged
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.hard_links import unchanged
from holdfast_service.storage import PosixStore, PosixTier
from tests.checkpoints import build, flip
from tests.daemon.copies_world import RUN, CopiesWorld, copies

STEPS = (1, 2, 3, 4, 5, 6)
ARRAYS = {
    "base": {"w": np.arange(2000, dtype=np.uint32)},
    "model": {"a": np.zeros(10, np.uint8)},
}
BASE = "base.safetensors"

world = copies(STEPS, arrays=ARRAYS)


def far(world: CopiesWorld, step: int, file: str = BASE) -> Path:
    return world.root.parent / "far" / naming.checkpoint_path(RUN, step) / file


def test_copies_of_unchanged_files_take_room_twice(world: CopiesWorld) -> None:
    """Neighbours have different ones, but for the first two copies."""
    world.copy()
    inodes = [far(world, step).stat().st_ino for step in STEPS]  # the newest was copied first
    assert len(set(inodes)) == 2 and inodes[5] == inodes[4]
    assert all(a != b for a, b in pairwise(inodes[:5]))
    for step in STEPS:
        assert verify(PosixTier(world.root.parent / "far"), naming.checkpoint_path(RUN, step)).step == step
        assert far(world, step).read_bytes() == (world.path(step) / BASE).read_bytes()


def test_a_damaged_copy_is_not_taken(world: CopiesWorld) -> None:
    """What is taken is read back; if that fails, the file is copied from the root."""
    replicator = world.replicators["far"]
    replicator.run_once()
    flip(far(world, 6), 5000)
    world.copy()
    inodes = {far(world, step).stat().st_ino for step in STEPS[:5]}
    assert far(world, 6).stat().st_ino not in inodes
    files = PosixTier(world.root.parent / "far")
    for step in STEPS[:5]:
        verify(files, naming.checkpoint_path(RUN, step))
    with pytest.raises(Damaged):
        verify(files, naming.checkpoint_path(RUN, 6))


def test_other_bytes_are_not_unchanged(tmp_path: Path) -> None:
    """The same name, header and length decide nothing; and a checkpoint has no file of another run."""
    changed = {**ARRAYS, "base": {"w": ARRAYS["base"]["w"] + np.uint32(1)}}
    build(tmp_path / naming.checkpoint_path(RUN, 1), ARRAYS, run=RUN, step=1)
    store = PosixStore(PosixTier(tmp_path))
    same = build(tmp_path / "same", ARRAYS, run=RUN, step=2).manifest
    assert unchanged(store, same) == {BASE: 1, "model.safetensors": 1}
    other = build(tmp_path / "other", changed, run=RUN, step=2).manifest
    assert unchanged(store, other) == {"model.safetensors": 1}
    assert unchanged(store, build(tmp_path / "elsewhere", ARRAYS, run="else", step=2).manifest) == {}

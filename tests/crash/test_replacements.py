"""A checkpoint is put in the place of a sound one of its step: after any cut or fault the one or the other is restored."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_formats.lineage import Lineage, Rewind
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.control.checkpoints import commit, planner
from holdfast_service.control.recovery import sweep
from holdfast_service.daemon.writing import writer
from holdfast_service.storage import PosixStore, PosixTier, posix
from tests.crash import power
from tests.crash.calls import Fault, steered
from tests.daemon.writing.test_path import Shards
from tests.in_memory import in_memory

RUN, STEP, NBYTES = "r", 7, 1700
REWOUND = Lineage(3, 1, (Rewind(2, 1, 3),))


def expected(attempt: int) -> np.ndarray:
    return np.random.default_rng(attempt).integers(0, 256, NBYTES, np.uint8)


def save(tier: PosixTier, attempt: int) -> None:
    """The second attempt's takes the place of the first one's."""
    shards = Shards(1, STEP)
    shards.attempt = attempt
    spec = TensorSpec("model", "w", "U8", (NBYTES,))
    shards.add(spec, expected(attempt).tobytes(), [(0, [Box((0,), (NBYTES,))])])
    plan = planner.plan(shards.tables())
    store, place = PosixStore(tier), naming.Place(RUN, STEP, attempt)
    writer.write(store.begin(place), plan, {0: memoryview(bytes(shards.data[0]))}, "node")
    about = commit.About(REWOUND, over=True) if attempt > 1 else commit.ABOUT
    commit.publish(store, plan, f"2026-01-0{attempt}T00:00:00Z", about=about)
    if attempt > 1:
        store.discard(place)


def restart(tier: PosixTier) -> None:
    """What a start does with a root before anything else."""
    sweep(PosixStore(tier))


def let_go(tier: PosixTier) -> None:
    """What is done once the checkpoint that stands there was read back."""
    store = PosixStore(tier)
    for place in store.replaced(RUN):
        store.discard(place)


def restored(root: Path) -> int:
    """Of which attempt the checkpoint is that stands there, every byte of it proven."""
    with open_checkpoint(root, None, RUN, STEP) as reader:
        assert reader.verify() == []
        assert np.array_equal(reader.read("model", "w"), expected(reader.manifest.attempt))
        return reader.manifest.attempt


@pytest.fixture(params=["exchange", "two renames"])
def exchanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file system exchanges names; where it does not, there is a moment in which neither has its name."""
    if request.param == "exchange":
        return True

    def lacking(*_: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(posix, "_exchange", lacking)
    return False


@pytest.fixture
def directory() -> Iterator[Path]:
    with in_memory() as made:
        yield made


def test_a_cut_after_every_operation_of_a_replacement(directory: Path, exchanging: bool) -> None:
    """The old one or the new one is restored, whole; once the new one was announced, that. An exchange leaves no gap."""
    root = directory / "recorded"
    tier = PosixTier(root)
    recorder = power.Recorder(root)
    with steered(recorder):
        save(tier, 1)
        begun = len(recorder.operations)
        save(tier, 2)
        recorder.tell("announced", STEP)
    told = len(recorder.operations)
    seen, known = set(), set()
    for number, (length, tree) in enumerate(power.cuts(recorder.operations, random.Random(0), 2)):
        key = (tuple(tree.items()), length >= told)
        if length < begun or key in known:
            continue
        known.add(key)
        made = directory / f"cut-{number}"
        power.build(tree, made)
        if exchanging:
            assert committed_steps(made, RUN) == [STEP], length
        restart(PosixTier(made))
        found = restored(made)
        assert found == 2 or length < told
        kept = naming.replaced_path(RUN, STEP)
        if found == 2:  # which nobody has read back: if a bit of it has flipped, the other one is still there
            assert PosixTier(made).size(f"{kept}/{naming.COMMIT}") is not None
        let_go(PosixTier(made))
        assert not list((made / RUN / naming.STAGING).iterdir())
        seen.add(found)
        shutil.rmtree(made)
    assert seen == {1, 2}


def test_a_fault_of_every_call_of_a_replacement(directory: Path, exchanging: bool) -> None:
    """Whichever call fails, the old one or the new one stands there, also once the next daemon has started."""
    for at in range(1, 1000):
        root = directory / f"fault-{at}"
        tier = PosixTier(root)
        save(tier, 1)
        fault = Fault(at, errno.EIO)
        with steered(fault):
            try:
                save(tier, 2)
                failed = False
            except CheckpointError:
                failed = True
        restart(PosixTier(root))
        assert restored(root) == 2 or failed
        shutil.rmtree(root)
        if not fault.failed:
            assert not failed and at > 20
            return
    raise AssertionError("the calls of a replacement did not end")

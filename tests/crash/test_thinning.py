"""A checkpoint is thinned or compacted: after any cut or fault the old or the new one is there, with the same weights."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from holdfast_files import opened
from holdfast_formats import naming
from holdfast_formats.disk import manifests, thinning
from holdfast_formats.errors import CheckpointError
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.control.checkpoints import commit, planner
from holdfast_service.control.recovery import sweep
from holdfast_service.daemon.copying.compactor import stage_compact
from holdfast_service.daemon.copying.copies import CopyControl
from holdfast_service.daemon.copying.thinner import stage
from holdfast_service.daemon.writing import writer
from holdfast_service.storage import PosixStore, PosixTier, posix
from tests.crash import power
from tests.crash.calls import Fault, steered
from tests.daemon.writing.test_path import Shards
from tests.in_memory import in_memory

RUN, STEP, NBYTES = "r", 7, 1700
DIRECTORY = naming.checkpoint_path(RUN, STEP)
PLACE = naming.job_place(RUN, STEP, "1")


MOMENT, SECOND = "w/exp_avg", "w/exp_avg_sq"


def expected(group: str) -> np.ndarray:
    """The weights, the first moment, or the second one."""
    chance = np.random.default_rng(sum(group.encode()))
    if group != "model":
        values = chance.standard_normal(NBYTES // 4, np.float32)
        return values if group == "optim" else np.square(values)
    return chance.integers(0, 256, NBYTES, np.uint8)


def save(tier: PosixTier) -> None:
    shards = Shards(1, STEP)
    moments = {name: TensorSpec("optim", name, "F32", (NBYTES // 4,)) for name in (MOMENT, SECOND)}
    specs = {"model": TensorSpec("model", "w", "U8", (NBYTES,)), "optim": moments[MOMENT], "second": moments[SECOND]}
    for what, spec in specs.items():
        shards.add(spec, expected(what).tobytes(), [(0, [Box((0,), spec.shape)])])
    plan = planner.plan([msgspec.structs.replace(one, groups=("model", "optim")) for one in shards.tables()])
    store, place = PosixStore(tier), naming.Place(RUN, STEP, shards.attempt)
    writer.write(store.begin(place), plan, {0: memoryview(bytes(shards.data[0]))}, "node")
    commit.publish(store, plan, "2026-01-01T00:00:00Z")


def thin(tier: PosixTier) -> None:
    """What the worker and control do with the files, in their order."""
    store, pair = PosixStore(tier), opened.open_checkpoint(tier, DIRECTORY)
    made = thinning.thin(pair.manifest, pair.encoded, tier.read(f"{DIRECTORY}/{naming.STATE}"), "2026-01-02T00:00:00Z")
    stage(store, PLACE, made, CopyControl())
    encoded = manifests.encode(made.manifest)
    commit.publish_copy(store, PLACE, encoded, manifests.encode_commit(made.manifest, encoded), over=True)


def compact(tier: PosixTier) -> None:
    """The same, of one that is stored in fewer bytes."""
    store, pair = PosixStore(tier), opened.open_checkpoint(tier, DIRECTORY)
    made = stage_compact(store, PLACE, pair, "int8", CopyControl())
    encoded = manifests.encode(made)
    commit.publish_copy(store, PLACE, encoded, manifests.encode_commit(made, encoded), over=True)


def clear(tier: PosixTier) -> None:
    store = PosixStore(tier)
    for place in (PLACE, *store.replaced(RUN)):
        store.discard(place)


def is_new(root: Path) -> bool:
    """Whether what stands there is what takes the place of the whole one; every byte of it is proven."""
    with open_checkpoint(root, None, RUN, STEP) as reader:
        assert reader.verify() == []
        assert np.array_equal(reader.read("model", "w"), expected("model"))
        if reader.manifest.thinned is not None:
            return True
        apart = np.linalg.norm(reader.read("optim", MOMENT) - expected("optim")) / np.linalg.norm(expected("optim"))
        small = reader.manifest.compacted
        assert apart == 0 if small is None else 0 < apart < 0.02
        assert small is None or small.tensors["optim"].keys() == {MOMENT, SECOND}
        return reader.manifest.compacted is not None


@pytest.fixture(params=["exchange", "two renames", "copies"])
def exchanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """File systems that exchange names, that do not, and that know no second names of files."""

    def lacking(*_: Any, **__: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if request.param == "copies":
        monkeypatch.setattr(posix, "_link", lacking)
    if request.param == "two renames":
        monkeypatch.setattr(posix, "_exchange", lacking)
    return request.param != "two renames"


@pytest.fixture
def directory() -> Iterator[Path]:
    with in_memory() as made:
        yield made


@pytest.mark.parametrize("act", [thin, compact])
def test_a_cut_after_every_operation(directory: Path, exchanging: bool, act: Callable[[PosixTier], None]) -> None:
    """One of the two is there, whole, at any moment; the thin one once it was published."""
    root = directory / "recorded"
    tier = PosixTier(root)
    recorder = power.Recorder(root)
    with steered(recorder):
        save(tier)
        begun = len(recorder.operations)
        act(tier)
        told = len(recorder.operations)
        clear(tier)
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
        sweep(PosixStore(PosixTier(made)))
        found = is_new(made)
        assert found or length < told
        clear(PosixTier(made))
        assert not list((made / RUN / naming.STAGING).iterdir())
        seen.add(found)
        shutil.rmtree(made)
    assert seen == {True, False}


@pytest.mark.parametrize("act", [thin, compact])
def test_a_fault_of_every_call(directory: Path, exchanging: bool, act: Callable[[PosixTier], None]) -> None:
    """Whichever call fails, one of the two stands there, also once the next daemon has started."""
    if act is compact and not exchanging:
        pytest.skip("the names are given as when it is thinned")
    save(PosixTier(directory / "saved"))
    # Compacting makes some 500 calls, most of them reads, and begins and ends with those that thinning makes.
    for at in range(1, 1000, 1 if act is thin else 7):
        root = directory / f"fault-{at}"
        shutil.copytree(directory / "saved", root)
        tier = PosixTier(root)
        fault = Fault(at, errno.EIO)
        with steered(fault):
            try:
                act(tier)
                clear(tier)
                failed = False
            except CheckpointError:
                failed = True
        sweep(PosixStore(PosixTier(root)))
        assert is_new(root) or failed
        shutil.rmtree(root)
        if not fault.failed:
            assert not failed and at > 20
            return
    raise AssertionError("the calls of a thinning did not end")

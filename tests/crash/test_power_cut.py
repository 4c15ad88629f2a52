"""A power cut at any moment of saves and removals: what was announced is there, what is visible is whole (I1, I3, I4).

Every state that `power` allows is made on a real directory and opened with the real reader, then swept like at a start.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from holdfast.read.directory_root import committed_steps
from holdfast.read.root_directory import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_formats.region import Box
from holdfast_formats.tensors import TensorSpec
from holdfast_service.control.checkpoints.removal import remove_checkpoint
from holdfast_service.control.checkpoints.run_files import RunFile, read_run_file, write_run_file
from holdfast_service.storage import PosixStore, PosixTier
from tests.crash import ledger, power
from tests.crash.calls import steered
from tests.daemon.writing.test_path import Shards
from tests.in_memory import in_memory

LANE = "power cuts, file model"
RUN = "r"
NBYTES = 1700  # of each of two tensors: files of several blocks
STEP_BYTES = 2 * NBYTES
TOLD = ("announced", "removing", "limited")


class Story(NamedTuple):
    """What was done to storage, and what the disk may therefore hold."""

    operations: list[power.Operation]
    told: list[tuple[int, power.Told]]  # by how many operations came before


def state(step: int) -> Shards:
    """Two tensors in files of their own; the bytes follow from the step."""
    shards = Shards(1, step)
    for name in ("a", "b"):
        spec = TensorSpec("model", name, "U8", (NBYTES,))
        shards.add(spec, expected(step, name).tobytes(), [(0, [Box((0,), (NBYTES,))])])
    return shards


def expected(step: int, name: str) -> np.ndarray:
    return np.random.default_rng([step, ord(name)]).integers(0, 256, NBYTES, np.uint8)


def limit(tier: PosixTier, last: int) -> None:
    """Change run.json."""
    write_run_file(tier, RUN, RunFile(keep_last=last))


def record(directory: Path) -> Story:
    """Three saves, each with a change of run.json behind it, and two removals, the second of them after the last save."""
    root = directory / "recorded"
    tier = PosixTier(root)
    recorder = power.Recorder(root)
    with steered(recorder):
        for step in (1, 2, 3):
            state(step).save(tier)  # type: ignore[arg-type] - a tier is a tier
            recorder.tell("announced", step)
            limit(tier, step)
            recorder.tell("limited", step)
            if step > 1:
                recorder.tell("removing", step - 1)
                assert remove_checkpoint(PosixStore(tier), RUN, step - 1) is None
    shutil.rmtree(root)
    operations = recorder.operations
    return Story(operations, [(index, op) for index, op in enumerate(operations) if isinstance(op, power.Told)])


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """The states that are made here are thousands."""
    with in_memory() as made:
        yield made


@pytest.fixture(scope="module")
def story(directory: Path) -> Story:
    return record(directory)


class Harm(NamedTuple):
    """A broken promise, and the bytes that it costs: announced and lost, or handed over and wrong."""

    what: str
    lost: int = 0
    wrong: int = 0


def harm(root: Path, told: list[power.Told]) -> Harm | None:
    """What a reader of this directory would suffer; None when all is as promised."""
    announced, removing, limited = ({op.step for op in told if op.what == what} for what in TOLD)
    visible = committed_steps(root, RUN)
    checkpoints = root / RUN / naming.CHECKPOINTS
    directories = sorted(entry.name for entry in checkpoints.iterdir()) if checkpoints.is_dir() else []
    if directories != sorted(naming.step_directory(step) for step in visible):
        return Harm(f"not all of {directories} are committed")
    if not announced - removing <= set(visible):
        return Harm(f"of {announced} but {removing} only {visible} are there", lost=STEP_BYTES)
    try:
        if (read_run_file(PosixTier(root), RUN).in_force.last or 0) < max(limited, default=0):
            return Harm(f"run.json does not say what it was told at step {max(limited)}")
    except CheckpointError as error:
        return Harm(error.detail)
    for step in visible:
        try:
            with open_checkpoint(root, None, RUN, step) as reader:
                damages = reader.verify()
                if damages:
                    return Harm(f"step {step} is visible and damaged: {damages[0].what}", lost=STEP_BYTES)
                if any(not np.array_equal(reader.read("model", name), expected(step, name)) for name in ("a", "b")):
                    return Harm(f"step {step} is visible and holds other bytes", wrong=STEP_BYTES)
        except CheckpointError as error:
            return Harm(f"step {step} is visible and cannot be read: {error.detail}", lost=STEP_BYTES)
    return None


def harms(story: Story, directory: Path, seed: int, samples: int) -> Iterator[Harm | None]:
    """What is wrong with each legal state after a cut, state by state; equal ones are made once."""
    known: dict[tuple[object, ...], Harm | None] = {}
    for number, (length, tree) in enumerate(power.cuts(story.operations, random.Random(seed), samples)):
        told = [op for index, op in story.told if index < length]
        key = (tuple(tree.items()), tuple(told))
        if key not in known:
            found = look_at(tree, directory / f"cut-{number}", told)
            known[key] = found and found._replace(what=f"after {length} operations: {found.what}")
        yield known[key]


def look_at(tree: power.Tree, root: Path, told: list[power.Told]) -> Harm | None:
    """What is wrong with a state, before and after the sweep that a start makes."""
    power.build(tree, root)
    try:
        before = harm(root, told)
        if before is not None:
            return before
        visible = committed_steps(root, RUN)
        tier = PosixTier(root)
        PosixStore(tier).sweep()
        if committed_steps(root, RUN) != visible or harm(root, told) is not None:
            return Harm(f"the sweep hurt one of {visible}", lost=STEP_BYTES)
        left = [*tier.list(f"{RUN}/{naming.STAGING}"), *tier.list(f"{RUN}/{naming.TRASH}")]
        return Harm(f"{left} stay after the sweep") if left else None
    finally:
        shutil.rmtree(root)


def check(story: Story, directory: Path, seed: int, samples: int) -> None:
    """No state harms anybody; all are counted."""
    found = []
    for each in harms(story, directory, seed, samples):
        ledger.tried(LANE)
        if each is None:
            ledger.survived(LANE)
            continue
        ledger.lost(LANE, each.lost)
        ledger.wrong(LANE, each.wrong)
        found.append(each.what)
    assert found == []


def test_a_cut_after_every_operation(story: Story, directory: Path) -> None:
    """After each of some hundred operations: the least, the most, and samples of what may have survived."""
    check(story, directory, seed=0, samples=2)


@pytest.mark.crash_slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_more_cuts(story: Story, directory: Path, seed: int) -> None:
    """The same with forty samples after every operation."""
    check(story, directory, seed, samples=20)


SYNCS: dict[str, Callable[[str], bool]] = {
    "tensors": lambda name: name.endswith(".safetensors"),
    "small files": lambda name: name.endswith(".json"),
    "run.json": lambda name: name == f".{naming.RUN_FILE}.new",
    "COMMIT": lambda name: name == naming.COMMIT,
    "the staged directory": lambda name: naming.parse_staging_directory(name) is not None,
    "staging/": lambda name: name == naming.STAGING,
    "checkpoints/": lambda name: name == naming.CHECKPOINTS,
    "trash/": lambda name: name == naming.TRASH,
    "the run": lambda name: name == RUN,
    "the root": lambda name: name == "",
}


@pytest.mark.parametrize("gone", SYNCS)
def test_without_one_kind_of_sync_a_cut_does_harm(story: Story, directory: Path, gone: str) -> None:
    """The lab finds what each fsync is for: the log without it has states that break a promise."""
    names = power.nodes(story.operations)
    operations = power.without_syncs(story.operations, lambda node: SYNCS[gone](names[node]))
    told = [(index, op) for index, op in enumerate(operations) if isinstance(op, power.Told)]
    assert len(operations) < len(story.operations)
    assert any(harms(Story(operations, told), directory, seed=0, samples=2))

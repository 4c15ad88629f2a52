"""A power cut at any moment of saves that drain to a bucket, and of retention behind them: every committed step is
in the root or in the bucket, whole, and a start finds all of it.

The bucket keeps what it has acknowledged; of the root's disk every state that `power` allows is made.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.read.directory_root import committed_steps
from holdfast_files.objects.client import WriteOutcome
from holdfast_formats import naming
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.control.retention.tier_retention import TierRetention
from holdfast_service.daemon.copying.replicas import Replicator
from holdfast_service.storage import PosixTier, stored_in
from tests.crash import power
from tests.crash.calls import steered
from tests.crash.test_power_cut import RUN, Story, check, directory, harms, state
from tests.daemon.copying.test_jobs_on_objects import stored
from tests.daemons import running
from tests.databases import sqlite_url
from tests.kit.memory_bucket import MemoryBucket

__all__ = ["directory"]

STEPS = (1, 2, 3)
STARTS = 12  # states from which control starts; a daemon does from the last of them


class TellingBucket(MemoryBucket):
    """Tells when a step is in the bucket: from then on it may leave the root."""

    def __init__(self, recorder: power.Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def put(self, key: str, data: Any, **options: Any) -> WriteOutcome:
        done = super().put(key, data, **options)
        step = naming.parse_step_directory(key.rpartition("/")[2])
        if done.outcome == "done" and step is not None:
            self._recorder.tell("removing", step)
        return done


def record(directory: Path, waits: bool) -> Story:
    """Three saves; after each the bucket gets what it lacks, and the root keeps one. `waits`: retention knows the tier."""
    root = directory / f"recorded-{waits}"
    tier, recorder = PosixTier(root), power.Recorder(root)
    storage, far = stored_in(tier), stored(TellingBucket(recorder))
    catalog = Catalog.open(sqlite_url(directory / f"catalog-{waits}.sqlite"))
    with steered(recorder):
        control = Control(storage, catalog, None)
        control.recovery.recover()
        worker = Replicator("far", tier, lambda: far, control.replicas, news=lambda seconds: False)
        worker.tier = TierRetention("far", None, catalog, control.files, control.replicas.lost)
        if waits:
            control.tiers.add("far", worker.standing.look)
        for step in STEPS:
            state(step).save(tier)  # type: ignore[arg-type] - a tier is a tier
            recorder.tell("announced", step)
            control.watch.relist(RUN)
            if step == STEPS[0]:
                control.rotation.set_policy(RUN, RetentionPolicy(last=1), "*")
            control.findings.sound(RUN, step)
            control.rotation.apply(RUN)
            while (waits or step == STEPS[-1]) and worker.run_once():
                pass
            control.rotation.apply(RUN)
        control.close()
    assert control.store.steps(RUN) == [STEPS[-1]] and far.store.steps(RUN)[-1] == STEPS[-1]
    catalog.close()
    shutil.rmtree(root)
    operations = recorder.operations
    return Story(operations, [(index, op) for index, op in enumerate(operations) if isinstance(op, power.Told)])


@pytest.fixture(scope="module")
def story(directory: Path) -> Story:
    return record(directory, waits=True)


def test_a_cut_after_every_operation_of_a_drain(story: Story, directory: Path) -> None:
    """No state has lost a step that was announced and is not in the bucket; what is visible is whole, before and after the
    sweep.
    """
    check(story, directory, seed=0, samples=2)


@pytest.mark.crash_slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_more_cuts_of_a_drain(story: Story, directory: Path, seed: int) -> None:
    """The same with forty samples after every operation."""
    check(story, directory, seed, samples=20)


def test_retention_that_does_not_wait_for_the_tier_does_harm(directory: Path) -> None:
    """The lab finds a root that removes what the bucket has yet to get."""
    found = [one for one in harms(record(directory, waits=False), directory, seed=0, samples=0) if one is not None]
    assert found and all("are there" in one.what for one in found)


def states(story: Story) -> Iterator[power.Tree]:
    """A few of the states that a cut may leave, from the first operations to the last."""
    made = [tree for _, tree in power.cuts(story.operations, random.Random(5), 1)]
    every = max(len(made) // STARTS, 1)
    yield from made[::-every][:STARTS]


def test_a_start_finds_what_a_cut_has_left(story: Story, directory: Path) -> None:
    """The catalog may be lost with the disk: it has the steps that stand, and a daemon with the tier serves them."""
    root = directory / "cut"
    for number, tree in enumerate(states(story)):
        power.build(tree, root)
        visible = committed_steps(root, RUN)
        catalog = Catalog.open(sqlite_url(directory / f"catalog-of-{number}.sqlite"))
        control = Control(stored_in(PosixTier(root)), catalog, None)
        control.recovery.recover()
        assert control.store.steps(RUN) == sorted(visible)
        control.close()
        catalog.close()
        if number == 0:
            with running(root, "--tier", f"far={directory / 'far'}") as daemon:
                assert daemon.about
        shutil.rmtree(root)

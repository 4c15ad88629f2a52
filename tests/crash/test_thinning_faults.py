"""A call of thinning or compacting fails, each from each place once: the next look does the rest, the next start sweeps."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.read.directory_root import committed_steps
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError
from holdfast_service.daemon.copying.thinner import Thinner
from tests.crash import ledger
from tests.crash.calls import Place, PlaceFault, steered
from tests.crash.test_thinning_deaths import FORMS, POLICY, STEPS, add, form, forms
from tests.daemon.copies_world import CopiesWorld, copies_world
from tests.in_memory import in_memory

LANE = "a call of a thinning fails"
PLACES_MIN = {errno.EIO: 200, errno.ENOSPC: 30}


@pytest.fixture
def world() -> Iterator[CopiesWorld]:
    with in_memory() as directory, copies_world(directory) as made:
        yield made


def begin(world: CopiesWorld, number: int) -> str:
    """A run of which two checkpoints are due."""
    run = add(world.root, number)
    world.control.recovery.recover()
    for step in STEPS:
        world.control.findings.sound(run, step)
    world.control.rotation.set_policy(run, POLICY, "*")
    assert world.control.rotation.wait_until_applied() and world.control.record_queue.recorded(30)
    return run


def left(root: Path, run: str) -> list[str]:
    """What stands beside its checkpoints."""
    rooms = [root / run / room for room in (naming.STAGING, naming.TRASH)]
    return [path.name for room in rooms if room.exists() for path in room.iterdir()]


@pytest.mark.crash_slow
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_fault_at_every_place(world: CopiesWorld, code: int) -> None:
    """At once the old checkpoint or the new one stands there; the same worker finishes when it looks again."""
    tried: set[Place] = set()
    for number in range(1, 1000):
        run, fault = begin(world, number), PlaceFault(code, tried)
        ledger.tried(LANE)
        worker = Thinner(world.control.store, world.control.thinning)
        with steered(fault):
            try:
                worker.run_once(run)
            except CheckpointError as error:
                assert error.hint, error
            assert world.control.record_queue.recorded(30)
        found = [form(world.root, run, step) for step in committed_steps(world.root, run)[::-1]]
        assert all(one in ("whole", new) for one, new in zip(found, FORMS, strict=True)), (fault.failed, found)
        worker.run_once(run)
        assert forms(world.root, run) == FORMS, fault.failed
        world.control.recovery.recover()
        assert left(world.root, run) == [], fault.failed
        listed = [world.catalog.checkpoint(run, step) for step in STEPS]
        assert ["thin" if one.thinned else "compact" if one.compacted else "whole" for one in listed] == FORMS, fault.failed
        ledger.survived(LANE)
        shutil.rmtree(world.root / run)
        if not fault.failed:
            assert len(tried) > PLACES_MIN[code]
            return
    raise AssertionError("the places of a thinning did not end")

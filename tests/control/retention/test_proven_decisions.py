"""Nothing is removed because of a checkpoint that is not there: what stays and counts is looked at on the storage first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from holdfast_formats import naming
from holdfast_formats.errors import NewestVerified, StorageFailed
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.control import Control
from holdfast_service.control.retention.policy import Candidate
from holdfast_service.storage import MemoryTier, stored_in
from tests.control.published import a_manifest, a_row, put_checkpoint
from tests.control.removers import Removers
from tests.daemons import wait_until
from tests.databases import sqlite_url

RUN = "run"


@dataclasses.dataclass
class World:
    tier: MemoryTier
    control: Control
    catalog: Catalog

    def put(self, *steps: int) -> None:
        for step in steps:
            put_checkpoint(self.tier, a_manifest(RUN, step))
            self.catalog.record_checkpoint(a_row(RUN, step))
            self.control.findings.sound(RUN, step)

    def keep(self, **rules: object) -> None:
        self.control.rotation.set_policy(RUN, RetentionPolicy(**rules), "*")
        assert self.control.rotation.wait_until_applied()

    @property
    def steps(self) -> list[int]:
        return self.control.store.steps(RUN)

    def damage(self, step: int, file: str, how: str) -> None:
        path = f"{naming.checkpoint_path(RUN, step)}/{file}"
        data = self.tier.read(path)
        if how == "directory gone":
            self.tier.remove_tree(naming.checkpoint_path(RUN, step))
            return
        self.tier.remove_file(path)
        if how != "gone":
            self.tier.put(path, data[:-1] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    tier = MemoryTier()
    catalog = Catalog.open(sqlite_url(tmp_path / "catalog.sqlite"))
    control = Control(stored_in(tier), catalog, None)
    control.recovery.recover()
    made = World(tier, control, catalog)
    made.put(1, 2, 3, 4)
    assert control.record_queue.recorded(30)
    yield made
    control.close()
    catalog.close()


hurt = pytest.mark.parametrize(
    ("file", "how"),
    [
        (naming.COMMIT, "directory gone"),
        *((file, how) for file in (naming.COMMIT, naming.MANIFEST, naming.STATE) for how in ("gone", "cut", "flipped")),
    ],
)


@hurt
def test_what_is_not_there_supersedes_nothing(world: World, file: str, how: str) -> None:
    """The newest one is gone, lacks a file, or has another one: the policy, a preview and a removal by hand go by the newest
    that is there, and a full disk finds none to remove because of it.
    """
    world.damage(4, file, how)
    rotation = world.control.rotation
    foreseen = rotation.verdicts.preview(RUN, RetentionPolicy(last=1)).verdicts
    assert {v.step: v.keep for v in foreseen if v.step < 4} == {1: False, 2: False, 3: True}
    assert not any(v.verified for v in foreseen if v.step == 4)
    with pytest.raises(NewestVerified):
        rotation.remove(RUN, 3)
    while rotation.make_room(RUN, Candidate(5, 0.0, groups=frozenset({"model"}))) is not None:
        pass
    assert 3 in world.steps
    world.keep(last=1)
    assert [step for step in world.steps if step < 4] == [3]


@hurt
def test_what_is_not_there_lets_nothing_be_thinned(world: World, file: str, how: str) -> None:
    """A checkpoint is thinned because newer whole ones are there."""
    full = ("model", "optim")
    for step in (5, 6):
        put_checkpoint(world.tier, a_manifest(RUN, step, groups=full))
        world.catalog.record_checkpoint(a_row(RUN, step, groups=full))
        world.control.findings.sound(RUN, step)
    world.keep(keep_full=1)
    assert [due.step for due in world.control.thinning.due(RUN)] == [5]
    world.damage(6, file, how)
    assert world.control.thinning.due(RUN) == []


@hurt
def test_an_alert_says_what_was_found(world: World, file: str, how: str) -> None:
    """A look of the daemon is enough: gone is no longer listed, damaged is listed as that, and both are told."""
    world.damage(4, file, how)
    world.control.watch.scan()
    expected = {"checkpoint-missing"} if how == "directory gone" else {"checkpoint-damaged", "checkpoint-changed"}
    wait_until(lambda: {event.kind for event in world.control.events.after(0, 100) if event.step == 4} & expected)
    listed = {made.step: made for made in world.catalog.checkpoints(RUN, None, 100).items}
    assert all(listed[step].verified for step in (1, 2, 3))
    if how == "directory gone":
        assert 4 not in listed
    else:
        assert not listed[4].verified
    if how in ("gone", "cut"):
        assert listed[4].damage is not None


def test_one_whose_files_were_replaced_counts_when_it_was_read_back_again(world: World) -> None:
    """A file that was written since the check may hold anything, or the same: that is read back, and then decided."""
    path = f"{naming.checkpoint_path(RUN, 4)}/{naming.STATE}"
    world.tier.replace(path, world.tier.read(path))
    asked: list[object] = []
    world.control.watch.unread.subscribe(asked.extend)
    world.keep(last=1)
    assert world.steps == [3, 4]
    assert asked == [(RUN, 4)]
    world.control.findings.sound(RUN, 4)
    assert world.control.rotation.wait_until_applied()
    assert world.steps == [4]


def test_where_the_storage_cannot_be_looked_at_nothing_is_removed(world: World) -> None:
    """An alert says why, once, and it goes on when the storage answers."""
    stamps = world.tier.stamp

    def fails(path: str) -> str:
        if f"/{naming.CHECKPOINTS}/" in path:
            raise StorageFailed(f"cannot stat {path}: input/output error")
        return stamps(path)

    world.tier.stamp = fails  # type: ignore[method-assign]
    world.keep(last=1)
    with pytest.raises(StorageFailed):
        world.control.rotation.apply(RUN)
    world.tier.stamp = stamps  # type: ignore[method-assign]
    assert world.steps == [1, 2, 3, 4]
    told = [event for event in world.control.events.after(0, 100) if event.kind == "removal-waits"]
    assert [event.level for event in told] == ["error"]
    world.control.rotation.apply(RUN)
    assert world.steps == [4]


class TestRemovers(Removers.TestCase):
    """In short; tests/crash/test_removers.py does the same at length."""

    settings = settings(max_examples=12, stateful_step_count=25, deadline=None, derandomize=True)

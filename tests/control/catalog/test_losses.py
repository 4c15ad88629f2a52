"""What a comparison finds to be gone is recorded as it is delisted, whatever is killed; what Holdfast removed is no loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from holdfast_formats import naming
from holdfast_formats.errors import StorageFailed
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import consistency, roots
from holdfast_service.control.control import Control
from holdfast_service.control.database.database import Database
from holdfast_service.control.findings import missing
from holdfast_service.storage import MemoryTier, PosixStore, stored_in
from tests.control.published import a_manifest, a_row, put_checkpoint
from tests.databases import sqlite_url

RUN = "run"


class Killed(BaseException):
    """The process is killed here: nothing is caught, and nothing goes on."""


class Life:
    """A process that is killed after so many beginnings and ends of transactions."""

    def __init__(self) -> None:
        self.left: int | None = None

    def goes_on(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    made, write = Life(), Database.write

    @contextmanager
    def mortal(database: Database, hasty: bool = False) -> Iterator[Session]:
        made.goes_on()
        with write(database, hasty) as session:
            yield session
        made.goes_on()

    monkeypatch.setattr(Database, "write", mortal)
    return made


@contextmanager
def opened(at: Path, tier: MemoryTier) -> Iterator[Control]:
    """A daemon's parts on this root, without their threads' work at a start."""
    catalog = Catalog.open(sqlite_url(at / "catalog.sqlite"), "node")
    control = Control(stored_in(tier), catalog, None)
    try:
        yield control
        control.close()
    finally:
        catalog.close()


@pytest.fixture
def tier(tmp_path: Path) -> MemoryTier:
    """A root with three sound checkpoints of a launch."""
    made = MemoryTier()
    with opened(tmp_path, made) as control:
        control.recovery.recover()
        control.launches.declare(RUN, "launch", 1, None)
        for step in (1, 2, 3):
            put_checkpoint(made, a_manifest(RUN, step))
            control.catalog.record_checkpoint(a_row(RUN, step))
            control.findings.sound(RUN, step)
        assert control.record_queue.recorded(30)
    return made


COMPARED: dict[str, Callable[[Control], object]] = {
    "watch": lambda control: control.watch.relist(RUN),
    "reconcile": lambda control: roots.reconcile(control.store, control.catalog),
    "rebuild": lambda control: consistency.rebuild(control.store, control.catalog, (), utc_now()),
}


@pytest.mark.parametrize("how", COMPARED)
def test_a_kill_at_any_transaction_leaves_no_loss_unrecorded(tmp_path: Path, tier: MemoryTier, life: Life, how: str) -> None:
    """At every moment each checkpoint that is gone is listed, so that it will be missed, or recorded as missing."""
    for step in (1, 2, 3):
        tier.remove_tree(naming.checkpoint_path(RUN, step))
    for after in range(20):
        with opened(tmp_path, tier) as control:
            life.left = after
            with suppress(Killed):
                COMPARED[how](control)
                after = -1
            life.left = None
            left = set(control.catalog.stamps(RUN))
            assert 3 in {*left, *missing.missing(control.catalog.database, RUN)}
            if not left:
                break
    assert not left
    with opened(tmp_path, tier) as control:
        assert 3 in missing.missing(control.catalog.database, RUN)


@pytest.mark.parametrize("how", COMPARED)
def test_what_is_removed_while_it_is_looked_at_is_a_loss(tmp_path: Path, tier: MemoryTier, how: str) -> None:
    """By hand: one was found to be damaged, and is gone with the next one a moment later."""
    damaged, newest = (naming.checkpoint_path(RUN, step) for step in (2, 3))

    class Vanishing(MemoryTier):
        def __getattribute__(self, name: str) -> Any:
            return object.__getattribute__(self, name) if name == "read" else getattr(tier, name)

        def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
            found = tier.read(path, offset, length)
            if path == f"{newest}/{naming.MANIFEST}":
                for directory in (damaged, newest):
                    tier.remove_tree(directory)
            return found

    tier.replace(f"{damaged}/{naming.MANIFEST}", b"{}")
    with opened(tmp_path, Vanishing()) as control:
        for _ in range(2):
            COMPARED[how](control)
        assert set(control.catalog.stamps(RUN)) == {1} and sorted(recorded(control)) == [2, 3]


def recorded(control: Control) -> list[int]:
    return [event.step or 0 for event in control.events.after(0, 100, kind=missing.KIND)]


@pytest.mark.parametrize("how", [*COMPARED, "start"])
def test_what_was_removed_just_before_a_kill_is_no_loss(tmp_path: Path, tier: MemoryTier, life: Life, how: str) -> None:
    """A person removes the newest checkpoint, and the daemon is killed after it is gone and before the catalog is told."""
    for after in range(10):
        with opened(tmp_path, tier) as control:
            life.left = after
            with suppress(Killed):
                control.rotation.remove(RUN, 3, newest=True)
            life.left = None
        if 3 not in PosixStore(tier).steps(RUN):
            break
    with opened(tmp_path, tier) as control:
        assert set(control.catalog.stamps(RUN)) == {1, 2, 3}
    with opened(tmp_path, tier) as control:
        if how == "start":
            control.recovery.recover()
            assert control.record_queue.recorded(30)
        else:
            COMPARED[how](control)
        assert set(control.catalog.stamps(RUN)) == {1, 2} and not recorded(control)


def test_a_removal_that_did_not_happen_leaves_a_checkpoint_that_can_be_lost(
    tmp_path: Path, tier: MemoryTier, life: Life
) -> None:
    """The daemon is killed before the checkpoint is gone; the next one finds it, and misses it when it goes by hand."""
    with opened(tmp_path, tier) as control:
        life.left = 1
        with pytest.raises(Killed):
            control.rotation.remove(RUN, 3, newest=True)
        life.left = None
        assert 3 in control.store.steps(RUN)
    with opened(tmp_path, tier) as control:
        control.recovery.recover()
        assert control.record_queue.recorded(30)
        assert control.catalog.checkpoint(RUN, 3).verified
    tier.remove_tree(naming.checkpoint_path(RUN, 3))
    with opened(tmp_path, tier) as control:
        control.recovery.recover()
        assert control.record_queue.recorded(30)
        assert recorded(control) == [3]


@pytest.mark.parametrize("when", ["before the rename", "after it"])
def test_a_removal_that_fails(tmp_path: Path, tier: MemoryTier, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """As on a disk that fails: a checkpoint that still stands can be lost by hand; one that is gone is no loss."""
    with opened(tmp_path, tier) as control:
        control.recovery.recover()
        rename = tier.publish

        def fails(source: str, target: str) -> None:
            if when == "after it":
                rename(source, target)
            raise StorageFailed("the disk fails")

        with monkeypatch.context() as failing, pytest.raises(StorageFailed):
            failing.setattr(tier, "publish", fails)
            control.rotation.remove(RUN, 3, newest=True)
        tier.remove_tree(naming.checkpoint_path(RUN, 3))
        control.watch.relist(RUN)
        assert recorded(control) == ([3] if when == "before the rename" else [])


def test_an_older_catalog_takes_no_removal_for_a_loss(tmp_path: Path, tier: MemoryTier) -> None:
    """A backup of the catalog lists what retention has removed since: newer checkpoints stand, and nothing is missed."""
    tier.remove_tree(naming.checkpoint_path(RUN, 1))
    put_checkpoint(tier, a_manifest(RUN, 4))
    with opened(tmp_path, tier) as control:
        control.recovery.recover()
        assert control.record_queue.recorded(30)
        assert set(control.catalog.stamps(RUN)) == {2, 3, 4} and not recorded(control)


def test_who_waits_for_events_is_woken(tmp_path: Path, tier: MemoryTier) -> None:
    """An event that a comparison records is heard as any other one."""
    heard: list[bool] = []
    tier.remove_tree(naming.checkpoint_path(RUN, 3))
    with opened(tmp_path, tier) as control:
        control.events.listen(lambda: heard.append(True))
        roots.reconcile(PosixStore(tier), control.catalog)
        assert heard and control.events.counts[missing.KIND] == 1

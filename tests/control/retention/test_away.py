"""What people do to a run while its catalog can be read and not written: it is done, and the catalog hears of it later; or
it is refused, and nothing was changed. No restart is needed either way.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.rest.runs import RunChange
from holdfast_service.control.catalog import losses, record_queue, run_settings
from holdfast_service.control.checkpoints import consistency
from holdfast_service.control.database import engines
from holdfast_service.control.retention import rotation
from tests.control.published import mark_verified
from tests.control.retention.test_run_trash import Root, opened
from tests.daemon.saver_world import RUN
from tests.daemons import wait_until
from tests.kit.commands import call

NEW = "another-name"


@pytest.fixture
def root(at: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Root]:
    monkeypatch.setattr(engines, "BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(rotation, "AWAY_RETRY_S", 0.05)
    with opened(at) as made:
        yield made


@contextmanager
def locked(at: Path) -> Iterator[None]:
    """Somebody else writes to the catalog, and does not end."""
    with closing(sqlite3.connect(at / "catalog.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def agrees(root: Root) -> bool:
    """Whether the catalog says what storage says, once it has been told."""
    assert root.control.record_queue.recorded(60)
    control = root.control
    return not consistency.check(control.store, control.rotation._catalog, thorough=True).items


def test_a_run_that_is_deleted(root: Root, at: Path) -> None:
    """It is in the trash, so it was deleted; it is listed no more as soon as the catalog can be written, with its event."""
    with locked(at):
        root.trash.delete(RUN)
        assert not root.stands() and [one.run for one in root.trash.entries()] == [RUN]
    assert not root.listed() and agrees(root)
    wait_until(lambda: bool(root.control.events.after(0, 9, RUN, "run-deleted")))
    with locked(at):
        root.trash.undelete(RUN)
    assert root.listed() and agrees(root)
    with locked(at):
        root.trash.delete(RUN)
        root.trash.undelete(RUN)  # the catalog still lists the one that was deleted, which is no other run
    assert root.listed() and agrees(root) and root.control.launches.declare(RUN, "another", 1, None) == 2


def test_a_deleted_run_whose_entry_is_removed_for_good(root: Root, at: Path) -> None:
    """Nothing of it is left to tell the catalog by, and it is listed no more all the same."""
    with locked(at):
        root.trash.delete(RUN)
        assert root.trash.empty(RUN) and not root.trash.entries()
    assert not root.listed() and agrees(root)


@pytest.mark.parametrize("how", ["start", "rebuild"])
def test_a_run_that_is_deleted_before_the_daemon_is_killed_is_no_loss(at: Path, tmp_path: Path, how: str) -> None:
    """The catalog never heard of it: the trash says that it was deleted, to the next daemon and to an offline rebuild."""
    with opened(at) as root:
        wait_until(lambda: root.control.record_queue.recorded(60))
        with locked(at):
            root.trash.delete(RUN)
            shutil.copytree(at, tmp_path / "killed")
    killed = tmp_path / "killed"
    if how == "rebuild":
        url = f"sqlite:///{killed / 'catalog.sqlite'}"
        for act in ("adopt", "rebuild"):
            done = call("catalog", act, "--root", str(killed / "root"), "--catalog", url)
            assert done.exit_code == 0, done.output
    with opened(killed) as root:
        assert not root.listed() and not root.control.events.after(0, 9, RUN, losses.KIND)
        assert root.trash.undelete(RUN).run == RUN and root.stands()


def test_a_run_that_was_launched_and_deleted_meanwhile(root: Root, at: Path) -> None:
    """What waits to be recorded of its launch does not have it listed again, nor makes a directory of that name."""
    with locked(at):
        attempt = root.control.launches.declare(RUN, "another", 1, None)
        root.control.launches.record_info(RUN, attempt, 1, {"user": "ana"})
        wait_until(lambda: root.control.record_queue.trouble is not None)
        root.trash.delete(RUN)
    assert not root.listed() and agrees(root) and not root.tier.list(RUN)
    root.trash.undelete(RUN)
    assert root.stands() and root.listed()
    assert root.control.launches.declare(RUN, "a third", 1, None) == attempt + 1


def test_a_new_run_asks_what_to_restore(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog can be read, has not heard of it, and it has not been found out yet that it cannot be written."""
    monkeypatch.setattr(record_queue, "STUCK_S", 0.05)
    with opened(at) as root:
        with locked(at):
            attempt = root.control.launches.declare("another-run", "launch", 1, None)
            assert root.control.restores.choose("another-run", attempt, 1, None, ()) is None
        assert root.control.record_queue.recorded(60)


def test_a_run_that_is_renamed(root: Root, at: Path) -> None:
    """Refused before anything can be seen of it; with a disk that fills at the last moment it is finished later."""
    with locked(at), pytest.raises(CatalogUnavailable, match="locked"):
        root.control.renaming.rename(RUN, NEW)
    assert root.stands() and root.tier.list(NEW) == [] and agrees(root)
    root.control.renaming.rename(RUN, NEW)
    assert root.stands(NEW) and agrees(root)


def test_a_renaming_that_the_catalog_leaves_half_done(root: Root, at: Path) -> None:
    """The catalog is locked just after the run has got its new name: the rest follows, without a restart."""
    held: list[sqlite3.Connection] = []
    publish = root.tier._tier.publish

    def publish_and_lock(source: str, target: str) -> None:
        publish(source, target)
        if target == NEW:
            held.append(sqlite3.connect(at / "catalog.sqlite", isolation_level=None))
            held[0].execute("BEGIN IMMEDIATE")

    root.tier.publish = publish_and_lock  # type: ignore[attr-defined]
    with pytest.raises(CatalogUnavailable) as caught:
        root.control.renaming.rename(RUN, NEW)
    assert "do not train" in caught.value.hint
    held[0].close()
    assert root.control.record_queue.recorded(60)
    assert root.stands(NEW) and not root.stands() and agrees(root)


def test_what_people_set(root: Root, at: Path) -> None:
    """The run's file has it, so it is in force: lists follow, and so does the policy."""
    catalog = root.control.rotation._catalog
    mark_verified(catalog, RUN, 1)
    mark_verified(catalog, RUN, 2)
    with locked(at):
        root.control.rotation.set_policy(RUN, RetentionPolicy(last=1), "*")
        root.control.run_metadata.change(RUN, RunChange(archived=True, owner="ana"), "idle", False, "somebody")
        assert root.control.rotation.files.read(RUN).owner == "ana"
    assert root.control.record_queue.recorded(60)
    (said,) = run_settings.known(catalog, [RUN]).values()
    assert said.owner == "ana" and said.archived and catalog.keep_last(RUN) == 1
    wait_until(lambda: root.control.store.steps(RUN) == [2])
    wait_until(lambda: agrees(root))
    kinds = {event.kind for event in root.control.events.after(0, 99, RUN)}
    assert {"policy-changed", "run-changed"} <= kinds

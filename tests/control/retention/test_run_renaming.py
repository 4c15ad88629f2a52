"""A run under another name: complete at one moment, bit for bit, with all that was known of it; refused while in use."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted, InUse, InvalidRequest, NoSuchRun, Pinned, StorageFailed
from holdfast_formats.rest.measurements import Acknowledgement
from holdfast_service.control.checkpoints import run_files
from holdfast_service.control.database.visible import limited_to
from holdfast_service.control.insight.acknowledgements import Acknowledgements, AlertKey
from holdfast_service.control.retention.run_renaming import RunRenaming
from holdfast_service.daemon.saving.run_deletion import rename_run
from holdfast_service.storage import MemoryTier
from tests.control.published import mark_verified
from tests.control.retention.conftest import STEPS
from tests.control.retention.test_run_trash import Killed, Root, opened
from tests.daemon.saver_world import RUN, saver_world
from tests.daemons import wait_until

NEW = "another-name"


@pytest.fixture
def root(at: Path) -> Iterator[Root]:
    with opened(at) as made:
        yield made


def test_a_renamed_run_is_the_same_run(root: Root, at: Path) -> None:
    """Files, marks, findings and numbers of attempts; the old name is in the trash, and takes no space of its own."""
    catalog, renaming = root.control.rotation._catalog, root.control.renaming
    mark_verified(catalog, RUN, 2)
    root.control.rotation.mark(RUN, 1, lambda file: run_files.pinned(file, 1))
    before = {path.name: path.read_bytes() for path in (at / "root" / naming.checkpoint_path(RUN, 2)).iterdir()}
    assert renaming.rename(RUN, NEW, dry_run=True).checkpoints == 2 and root.stands()
    renaming.rename(RUN, NEW)
    assert root.stands(NEW) and not root.stands()
    with pytest.raises(NoSuchRun):
        catalog.run(RUN)
    assert catalog.checkpoint(NEW, 2).verified and catalog.checkpoint(NEW, 1).run == NEW
    assert root.control.rotation.file(NEW).pins == (1,)
    assert (root.control.attempts.newest(RUN), root.control.attempts.newest(NEW)) == (0, 1)
    after = {path.name: path for path in (at / "root" / naming.checkpoint_path(NEW, 2)).iterdir()}
    assert set(after) == set(before)
    for name, data in before.items():
        if name not in (naming.COMMIT, naming.MANIFEST):
            assert after[name].read_bytes() == data and after[name].stat().st_nlink == 2
    assert json.loads(after[naming.MANIFEST].read_bytes())["run"] == NEW
    (entry,) = root.trash.entries()
    assert (entry.run, entry.checkpoints) == (RUN, 2) and naming.RENAMED_FILE not in root.tier.list(NEW)
    assert root.control.launches.declare(NEW, "another", 1, None) == 2
    (event,) = root.control.events.after(0, 100, NEW, "run-renamed")
    assert event.detail == {"old": RUN}
    with limited_to(f"{NEW}*"):  # people of another team do not read what it was called
        (event,) = root.control.events.after(0, 100, NEW, "run-renamed")
        assert (event.text, event.detail) == (f"a run was renamed to {NEW}", {})
    with limited_to(f"{NEW}*,{RUN}"):
        assert root.control.events.newest(None, 1, NEW, "run-renamed").items[0].detail == {"old": RUN}


def test_who_has_seen_an_alert_has_seen_it_under_the_new_name(root: Root) -> None:
    """And a run that is deleted takes what was said of its alerts along: the next one of its name has its own."""
    seen = Acknowledgements(root.control.rotation._catalog.database)
    made = Acknowledgement(by="ana", at="2026-01-01T00:00:00Z")
    seen.set(AlertKey(RUN, "checkpoint-unhealthy"), made)
    seen.set(AlertKey(RUN, "replica-behind", "far"), made.model_copy(update=dict(until="2100-01-01T00:00:00Z")))
    seen.set(AlertKey(NEW, "replica-behind", "far"), made)  # of a run that was called so once
    root.control.renaming.rename(RUN, NEW)
    found = seen.known()
    assert set(found) == {AlertKey(NEW, "checkpoint-unhealthy"), AlertKey(NEW, "replica-behind", "far")}
    assert found[AlertKey(NEW, "replica-behind", "far")].until is not None
    root.trash.delete(NEW)
    wait_until(lambda: not seen.known())


def test_killed_at_every_step(at: Path) -> None:
    """The next start finds the run under the old name or the new one, whole, and never under both."""
    names = {_killed(at, kill_at) for kill_at in _moments(at)}
    assert names == {RUN, NEW}


def _moments(at: Path) -> list[int]:
    """When to kill it: before and after each change, but of what is done in `.holdfast.renaming`, where all is alike, before
    the first, in the midst, and after the last.
    """
    trial = at / "whole"
    shutil.copytree(at / "root", trial / "root", symlinks=True)
    with opened(trial) as root:
        root.tier.mortal(0)
        root.control.renaming.rename(RUN, NEW)
        changed = root.tier.changed
    built = sum(path.startswith(naming.RENAMING) for path in changed)
    assert all(path.startswith(naming.RENAMING) for path in changed[:built]) and built > 10
    return [1, built, *range(2 * built - 3, 2 * len(changed) + 1)]


def _killed(at: Path, kill_at: int) -> str:
    """The name that is there after the next start."""
    trial = at / f"trial-{kill_at}"
    shutil.copytree(at / "root", trial / "root", symlinks=True)
    with opened(trial) as root:
        root.tier.mortal(kill_at)
        with pytest.raises(Killed):
            root.control.renaming.rename(RUN, NEW)
    with opened(trial) as root:
        assert root.control.record_queue.recorded(30)
        there = [name for name in (RUN, NEW) if root.stands(name)]
        assert len(there) == 1, there
        listed = root.control.rotation._catalog.known_runs()
        assert set(listed) == set(there) and listed[there[0]].attempt == 1
        assert root.control.attempts.newest(there[0]) == 1
        assert sorted(root.control.rotation._catalog.stamps(there[0])) == STEPS
        assert not root.tier.list(naming.RENAMING) and naming.RENAMED_FILE not in root.tier.list(there[0])
        assert [one.run for one in root.trash.entries()] == ([RUN] if there == [NEW] else [])
    shutil.rmtree(trial)
    return there[0]


def test_what_changes_meanwhile_is_not_lost(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin that comes while the files get their second names: nothing is renamed."""
    renaming, rotation = root.control.renaming, root.control.rotation
    build = renaming._build

    def pinned(run: str, name: str, attempt: int) -> object:
        built = build(run, name, attempt)
        rotation.mark(RUN, 1, lambda file: run_files.pinned(file, 1))
        return built

    monkeypatch.setattr(renaming, "_build", pinned)
    with pytest.raises(InUse, match="changed"):
        renaming.rename(RUN, NEW)
    assert root.stands() and not root.tier.list(NEW) and rotation.file(RUN).pins == (1,)
    monkeypatch.undo()
    renaming.rename(RUN, NEW)
    assert root.stands(NEW) and rotation.file(NEW).pins == (1,)


def test_what_was_trained_meanwhile_stays(at: Path) -> None:
    """A launch of the old name, between the kill and the start that would finish: both stay."""
    with opened(at) as root:
        published = 0
        for kill_at in count(1):
            root.tier.mortal(kill_at)
            with suppress(Killed):
                root.control.renaming.rename(RUN, NEW)
            root.tier.mortal(0)
            published = kill_at
            if root.tier.list(NEW):
                break
        assert published and root.stands()
        assert root.control.launches.declare(RUN, "since", 1, None) == 2
    with opened(at) as root:
        assert root.stands() and root.stands(NEW) and root.trash.entries() == []
        assert naming.RENAMED_FILE not in root.tier.list(NEW)
        assert (root.control.attempts.newest(RUN), root.control.attempts.newest(NEW)) == (2, 1)


def test_what_holds_a_run_refuses_it_by_name(root: Root, at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are taken or are none, links, readers, storage without links, several daemons; nothing is moved."""
    renaming = root.control.renaming
    with pytest.raises(NoSuchRun):
        renaming.rename("nobody", NEW)
    for name in (RUN, "../x", ""):
        with pytest.raises((AlreadyCommitted, InvalidRequest)):
            renaming.rename(RUN, name)
    (at / "root" / "taken").mkdir()
    (at / "root" / "taken" / "mine").write_text("mine")
    with pytest.raises(AlreadyCommitted, match="already"):
        renaming.rename(RUN, "taken")
    assert root.control.launches.declare("begun", "one", 1, None) == 1
    with pytest.raises(AlreadyCommitted, match="already"):
        renaming.rename(RUN, "begun")
    links = at / "links"
    links.mkdir()
    (links / "last").symlink_to(at / "root" / naming.checkpoint_path(RUN, 1))
    root.control.rotation.watch_links(RUN, str(links))
    with pytest.raises(Pinned, match="last"):
        renaming.rename(RUN, NEW)
    os.unlink(links / "last")
    with root.control.readers.reading(RUN, 1), pytest.raises(InUse, match="being read"):
        renaming.rename(RUN, NEW)
    monkeypatch.setattr(renaming, "_is_alone", False)
    with pytest.raises(InvalidRequest, match="several daemons"):
        renaming.rename(RUN, NEW)
    assert root.stands() and root.listed() and not root.tier.list(NEW)


@pytest.mark.parametrize("file", [naming.COMMIT, naming.MANIFEST, naming.STATE, "model-00001-of-00001.safetensors"])
def test_a_damaged_checkpoint_goes_along_and_is_named(root: Root, at: Path, file: str) -> None:
    """What is lacking, or cannot be read, is lacking under the new name; the others are verified as they were."""
    catalog, there = root.control.rotation._catalog, at / "root" / naming.checkpoint_path(RUN, 1)
    root.control.findings.sound(RUN, 2)
    if not (there / file).exists():
        file = next(path.name for path in sorted(there.iterdir()) if path.name.endswith(".safetensors"))
    left = {path.name for path in there.iterdir()} - {file}
    os.unlink(there / file)
    renamed = root.control.renaming.rename(RUN, NEW)
    assert list(renamed.damaged) == [1] and file in renamed.damaged[1]
    assert {path.name for path in (at / "root" / naming.checkpoint_path(NEW, 1)).iterdir()} == left
    assert not catalog.checkpoint(NEW, 1).verified and catalog.checkpoint(NEW, 1).damage is not None
    assert catalog.checkpoint(NEW, 2).verified and root.control.rotation.proofs.stands(NEW, 2)
    assert not root.tier.list(RUN)
    root.control.watch.scan()
    assert catalog.checkpoint(NEW, 2).verified


def test_a_run_that_is_not_all_there_under_its_new_name_keeps_the_old_one(root: Root, at: Path) -> None:
    """Somebody has removed a file of it before a start finishes what a kill has interrupted."""
    finish = RunRenaming._finish
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RunRenaming, "_finish", lambda *_: None)
        root.control.renaming.rename(RUN, NEW)
    assert root.stands() and finish is RunRenaming._finish
    os.unlink(at / "root" / naming.checkpoint_path(NEW, 2) / naming.STATE)
    with pytest.raises(StorageFailed, match="kept"):
        root.control.renaming.recover()
    assert root.stands() and root.listed()


def test_storage_without_second_names_is_refused(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves nothing behind that a start would not remove."""
    monkeypatch.setattr(root.tier._tier, "link", lambda source, target: False)
    with pytest.raises(InvalidRequest, match="hard links"):
        root.control.renaming.rename(RUN, NEW)
    assert root.stands() and root.listed() and not root.tier.list(NEW)
    root.control.renaming.recover()
    assert not root.tier.list(naming.RENAMING)


def test_ranks_of_neither_run_are_here() -> None:
    """A run is renamed once its ranks have gone, and not to the name of one that trains."""
    with saver_world(MemoryTier()) as world:
        rank = world.saved(1)
        world.checked()
        assert world.control.record_queue.recorded(30)
        renaming: RunRenaming = world.control.renaming
        with pytest.raises(InUse, match="connected"):
            rename_run(renaming, world.saver, world.arena, RUN, NEW)
        rank.leave()
        with pytest.raises(AlreadyCommitted):
            rename_run(renaming, world.saver, world.arena, RUN, RUN)
        assert world.committed() == [1]
        assert rename_run(renaming, world.saver, world.arena, RUN, NEW, dry_run=True).name == RUN

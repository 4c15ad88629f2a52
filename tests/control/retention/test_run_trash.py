"""Deleting a run and bringing it back: whole at every moment, whatever is killed, and refused where something holds it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import update

from holdfast_formats import naming, timestamps
from holdfast_formats.errors import CheckpointError, InUse, NoSpace, NoSuchResource, NoSuchRun, Pinned
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_service.control.catalog import run_settings
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import roots, run_files
from holdfast_service.control.checkpoints.run_files import RunFile
from holdfast_service.control.control import Control
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow
from holdfast_service.control.retention.run_trash import DAY_S, RunTrash
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.saving.run_deletion import delete_run, undelete_run
from holdfast_service.storage import PosixStore, PosixTier, stored_in
from tests.control.published import mark_verified
from tests.control.retention.conftest import STEPS
from tests.daemon.saver_world import RUN, saver_world
from tests.databases import sqlite_url

_CHANGES = ("put", "replace", "publish", "remove_file", "remove_tree", "sync_directory")


class Killed(BaseException):
    """The process is killed here: nothing is caught, and nothing goes on."""


class MortalTier:
    """A tier, whose process is killed before (odd) or after (even) one of its changes."""

    def __init__(self, tier: PosixTier) -> None:
        self._tier, self.kill_at, self._seen = tier, 0, 0
        self.changed: list[str] = []  # where it was changed since `mortal`

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._tier, name)
        if name not in _CHANGES:
            return act

        def change(*arguments: Any) -> Any:
            self._seen += 1
            self.changed.append(str(arguments[0]))
            if self.kill_at == 2 * self._seen - 1:
                raise Killed
            found = act(*arguments)
            if self.kill_at == 2 * self._seen:
                raise Killed
            return found

        return change

    def mortal(self, at: int) -> None:
        self.kill_at, self._seen, self.changed = at, 0, []


class Root(NamedTuple):
    """A root with its control, as one daemon has them."""

    tier: MortalTier
    control: Control

    @property
    def trash(self) -> RunTrash:
        return self.control.trash

    def stands(self, directory: str = RUN) -> bool:
        """Whether the run is there, with all its checkpoints sound; fails on a part of it."""
        names = self.tier.list(f"{directory}/{naming.CHECKPOINTS}")
        for name in names:
            verify(self.tier._tier, f"{directory}/{naming.CHECKPOINTS}/{name}")
        assert names in ([], [naming.step_directory(step) for step in STEPS])
        return bool(names)

    def listed(self) -> bool:
        assert self.control.record_queue.recorded(30)
        try:
            known = self.control.rotation.file(RUN)
        except NoSuchRun:
            assert self.control.attempts.newest(RUN) == 0
            return False
        return known is not None


@contextmanager
def opened(at: Path) -> Iterator[Root]:
    """A daemon's start on this root, and its end."""
    tier = MortalTier(PosixTier(at / "root"))
    catalog = Catalog.open(sqlite_url(str(at / "catalog.sqlite")))
    control = Control(stored_in(tier), catalog, None)  # type: ignore[arg-type]
    control.recovery.recover()
    assert control.record_queue.recorded(30)
    try:
        yield Root(tier, control)
    finally:
        tier.mortal(0)
        control.close()
        catalog.close()


@pytest.fixture
def root(at: Path) -> Iterator[Root]:
    with opened(at) as made:
        yield made


def test_a_deleted_run_is_nowhere_but_in_the_trash(root: Root) -> None:
    """And comes back as it was, to be read back again; its attempts' numbers are not used again."""
    told: list[Any] = []
    root.trash.restored.subscribe(told.extend)
    assert root.trash.delete(RUN, dry_run=True).checkpoints == 2 and root.listed()
    made = root.trash.delete(RUN)
    assert (made.run, made.checkpoints, made.newest, made.attempt) == (RUN, 2, 2, 1) and made.bytes > 0 and made.expires
    assert not root.stands() and not root.listed() and root.stands(f"{naming.RUN_TRASH}/{made.entry}")
    assert [one.entry for one in root.trash.entries()] == [made.entry] and root.trash.seen().bytes == made.bytes
    assert root.control.lineage_index.launch(RUN, 2) is None
    with pytest.raises(NoSuchRun):
        root.trash.delete(RUN)
    root.trash.undelete(RUN)
    assert root.stands() and root.listed() and root.trash.entries() == []
    assert naming.DELETED_FILE not in root.tier.list(RUN)
    assert told == [CheckpointId(RUN, step) for step in STEPS] and root.control.attempts.newest(RUN) == 1
    assert root.control.launches.declare(RUN, "another", 1, None) == 2
    with pytest.raises(NoSuchResource, match="holds no run"):
        root.trash.undelete(RUN)
    kinds = [event.kind for event in root.control.events.after(0, 100, RUN)]
    assert [kind for kind in kinds if "delete" in kind] == ["run-deleted", "run-undeleted"]


def test_a_run_of_the_same_name_is_another_one(root: Root) -> None:
    """It is not taken for the deleted one by a restart, and is in the way of bringing that one back."""
    first = root.trash.delete(RUN)
    assert root.control.launches.declare(RUN, "another", 1, None) == 1
    root.trash.recover()
    assert root.control.attempts.newest(RUN) == 1
    with pytest.raises(InUse, match="another run"):
        root.trash.undelete(RUN)
    assert root.control.record_queue.recorded(30)
    second = root.trash.delete(RUN)
    assert second.checkpoints == 0
    root.trash.undelete(RUN, first.entry)
    assert root.stands() and root.listed()


@pytest.mark.parametrize("act", ["delete", "undelete", "empty"])
def test_killed_at_every_step(at: Path, act: str) -> None:
    """The next start finds the run whole where it was, or whole where it was to go, and says so everywhere."""

    def do(root: Root) -> None:
        step: Callable[[str], object] = getattr(root.trash, act)
        step(RUN)

    if act != "delete":
        with opened(at) as root:
            root.trash.delete(RUN)
    ended: set[bool] = set()
    for kill_at in count(1):
        trial = at / f"trial-{kill_at}"
        shutil.copytree(at / "root", trial / "root", symlinks=True)
        with opened(trial) as root:
            root.tier.mortal(kill_at)
            survived = False
            with suppress(Killed):
                do(root)
                survived = True
        with opened(trial) as root:
            entries = root.trash.entries()
            stands = root.stands()
            assert root.listed() == stands and stands + len(entries) == (0 if act == "empty" and not entries else 1)
            assert all(root.stands(f"{naming.RUN_TRASH}/{one.entry}") for one in entries)
            assert not stands or naming.DELETED_FILE not in root.tier.list(RUN)
            root.trash.expire()
            kept = {one.entry for one in root.trash.entries()}
            assert set(root.tier.list(naming.RUN_TRASH)) == kept, "the rest of what was removed for good is freed"
            ended.add(bool(entries))
            if entries:
                root.trash.undelete(RUN)
                assert root.stands() and root.listed() and root.control.attempts.newest(RUN) >= 1
        if survived:
            break
        assert kill_at < 40, "it takes more steps than this test looks at"
    assert ended == {True, False}, "no step was one that decides"


def test_what_holds_a_run_refuses_it_by_name(root: Root, at: Path) -> None:
    """Pins, links, readers, and files that are not ours; nothing is moved."""
    rotation = root.control.rotation
    rotation.mark(RUN, 2, lambda file: run_files.pinned(file, 2))
    with pytest.raises(Pinned, match="pinned or labelled: 2"):
        root.trash.delete(RUN)
    assert root.trash.delete(RUN, marked=True, dry_run=True).checkpoints == 2
    rotation.unmark(RUN, lambda file: run_files.unpinned(file, 2))
    links = at / "links"
    links.mkdir()
    (links / "last").symlink_to(at / "root" / naming.checkpoint_path(RUN, 1))
    root.control.rotation.watch_links(RUN, str(links))
    with pytest.raises(Pinned, match="last"):
        root.trash.delete(RUN, marked=True)
    (links / "last").unlink()
    with root.control.readers.reading(RUN, 1), pytest.raises(InUse, match="being read: 1"):
        root.trash.delete(RUN)
    for foreign in (f"{RUN}/mine", f"{RUN}/{naming.CHECKPOINTS}/mine", f"{naming.checkpoint_path(RUN, 1)}/mine"):
        (at / "root" / foreign).write_text("mine")
        with pytest.raises(InUse, match=r"did not write.*mine"):
            root.trash.delete(RUN)
        (at / "root" / foreign).unlink()
    assert root.stands() and root.listed() and root.trash.entries() == []
    (at / "root" / RUN / ".run.json.new").write_text("{")  # a crash left it
    with root.control.readers.checking(RUN, 1):  # a check finds out by itself that what it reads is gone
        root.trash.delete(RUN)


def test_the_trash_is_emptied_in_time_and_for_room(root: Root) -> None:
    """After so many days; the oldest first where the disk is full; and never, where that was said."""
    now = float(int(root.trash._clock()))
    root.trash._clock = lambda: now
    made = root.trash.delete(RUN)
    assert root.trash.expire() == []
    root.trash.days = None
    assert root.trash.seen().items[0].expires is None and root.trash.expire() == []
    root.trash.days = 3
    passed = later(root, now, 71)
    assert passed == [] and root.trash.seen().items[0].expires == timestamps.later(_at(now), 3 * DAY_S)
    root.trash._clock = lambda: now + 3 * DAY_S + 60
    assert root.trash.expire() == [made.entry] and root.tier.list(naming.RUN_TRASH) == []
    with pytest.raises(NoSuchResource):
        root.trash.empty(RUN)
    events = root.control.events.after(0, 100, RUN, "run-purged")
    assert ["3 days ago" in event.text for event in events] == [True]


def _at(seconds: float) -> str:
    return timestamps.write(datetime.fromtimestamp(seconds, timezone.utc))


def later(root: Root, now: float, hours: int) -> list[str]:
    """A daemon that looks every hour, by this clock; what it has removed."""
    gone: list[str] = []
    for hour in range(hours + 1):
        root.trash._clock = lambda: now + hour * 3600.0  # noqa: B023 - it is asked at once
        gone += root.trash.expire()
    return gone


def test_a_clock_that_jumps_empties_no_trash(at: Path) -> None:
    """By years, ahead, back and again, with and without restarts of the daemon; nor is it kept for ever then."""
    with opened(at) as root:
        made = root.trash.delete(RUN)
        now = root.trash._clock()
        for wrong in (now, now + 365 * DAY_S, 0.0, now, 3e11, -5.0, now + 3600.0):
            root.trash._clock = lambda: wrong  # noqa: B023 - it is asked at once
            assert root.trash.expire() == [], wrong
            assert root.trash.entries()[0].expires is not None
    for _ in range(3):
        with opened(at) as root:
            root.trash._clock = lambda: now + 10 * 365 * DAY_S
            assert root.trash.expire() == [] and root.trash.entries()
    (at / "root" / naming.RUN_TRASH_AGES).write_text("{")
    with opened(at) as root:
        assert root.trash.expire() == [] and later(root, now, 100) == []
        assert later(root, now + 100 * 3600.0, 80) == [made.entry]


def test_a_full_disk_does_not_keep_a_run_from_being_deleted(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trash makes room for the note of what is deleted."""
    first = root.trash.delete(RUN)
    shutil.copytree(Path(root.tier._tier.root) / naming.RUN_TRASH / first.entry, Path(root.tier._tier.root) / RUN)
    root.trash.recover()
    roots.list_run(PosixStore(root.tier._tier), root.control.rotation._catalog, RUN)
    root.control.findings.sound(RUN, 1)
    replace = root.tier._tier.replace

    def on_full_disk(path: str, data: bytes) -> None:
        if path.endswith(naming.DELETED_FILE) and root.trash.entries():
            raise NoSpace("the disk is full")
        replace(path, data)

    monkeypatch.setattr(root.tier._tier, "replace", on_full_disk)
    monkeypatch.setattr(root.tier._tier, "free_bytes", lambda: 0 if root.trash.entries() else 10**9)
    second = root.trash.delete(RUN)
    assert [one.entry for one in root.trash.entries()] == [second.entry] != [first.entry]


def test_a_deleted_run_stays_while_what_came_in_its_place_is_not_sound(root: Root) -> None:
    """The run was trained again, and nothing of that can be restored: no age and no full disk takes the deleted one, and an
    alert says so. When something of it is sound, the deleted one goes.
    """
    now = float(int(root.trash._clock()))
    root.trash._clock = lambda: now
    made = root.trash.delete(RUN)
    directory = Path(root.tier._tier.root)
    shutil.copytree(directory / naming.RUN_TRASH / made.entry / naming.CHECKPOINTS, directory / RUN / naming.CHECKPOINTS)
    catalog = root.control.rotation._catalog
    roots.list_run(PosixStore(root.tier._tier), catalog, RUN)
    for step in STEPS:
        root.control.findings.sound(RUN, step)
        (directory / naming.checkpoint_path(RUN, step) / naming.STATE).unlink()
    for _ in range(2):
        assert not root.trash.make_room(2**62, "a save")
    root.trash.days = 1
    assert later(root, now, 72) == [] and [one.entry for one in root.trash.entries()] == [made.entry]
    (told,) = root.control.events.after(0, 100, RUN, "removal-waits")
    assert told.level == "error" and told.detail["entry"] == made.entry
    state = naming.checkpoint_path(RUN, STEPS[0]) + f"/{naming.STATE}"
    shutil.copy(directory / naming.RUN_TRASH / made.entry / state.partition("/")[2], directory / state)
    root.control.findings.sound(RUN, STEPS[0])
    assert not root.trash.make_room(2**62, "a save") and root.trash.entries() == []


def test_the_last_sound_copy_is_not_deleted(root: Root) -> None:
    """With its run the copies in replicas go: where nothing else is sound of a checkpoint, that has to be said."""
    database = root.control.rotation._catalog.database
    mark_verified(root.control.rotation._catalog, RUN, 1)
    with database.write() as session:
        session.add(ReplicaRow(run=RUN, step=1, tier="other", state="present", bytes=1, since=""))
    assert root.trash.delete(RUN, dry_run=True)
    with database.write() as session:
        session.execute(update(CheckpointRow).where(CheckpointRow.step == 1).values(damage={"code": "corrupt"}))
        session.add(ReplicaRow(run=RUN, step=9, tier="other", state="present", bytes=1, since=""))
    with pytest.raises(Pinned, match=r"2 checkpoints of .* are known to be sound only in replicas: 1, 9"):
        root.trash.delete(RUN)
    with pytest.raises(Pinned, match="only in replicas"):
        root.control.renaming.rename(RUN, "another-name")
    assert root.stands() and root.trash.delete(RUN, marked=True).checkpoints == 2


def test_a_full_disk_empties_the_trash_first(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything that somebody keeps goes, and only as far as needed; it is told for whom."""
    tier = PosixTier(at / "root")
    with saver_world(tier) as world:
        world.control.recovery.recover()
        trash = world.control.trash
        for _ in range(2):
            rank = world.saved(5)
            world.checked()
            assert world.control.record_queue.recorded(30)
            rank.leave()
            delete_run(trash, world.saver, world.arena, RUN)
        newest, oldest = trash.entries()
        monkeypatch.setattr(tier, "free_bytes", lambda: 0 if len(trash.entries()) > 1 else 10**9)
        rank = world.saved(6)
        assert [one.entry for one in trash.entries()] == [newest.entry]
        (event,) = world.control.events.after(0, 100, RUN, "run-purged")
        assert f"no room for {RUN}@6" in event.text and event.level == "warning" and event.detail["entry"] == oldest.entry
        rank.leave()


def test_what_is_not_ours_in_the_trash_is_left_alone(root: Root, at: Path) -> None:
    """Neither listed, nor removed, nor brought back."""
    there = at / "root" / naming.RUN_TRASH
    for name in ("mine", f"{RUN}@12", "other@5", f"{RUN}@x"):
        (there / name).mkdir(parents=True)
    (there / "other@5" / naming.DELETED_FILE).write_text("{")
    (there / "no-time@5").mkdir()
    note = {"run": "no-time", "deleted": "soon", "checkpoints": 1, "newest": 1, "bytes": 1, "attempt": 1, "launch": None}
    (there / "no-time@5" / naming.DELETED_FILE).write_text(json.dumps(note))
    made = root.trash.delete(RUN)
    assert [one.entry for one in root.trash.entries()] == [made.entry]
    root.trash.days = 0
    assert root.trash.expire() == [made.entry]
    assert sorted(path.name for path in there.iterdir()) == ["mine", "no-time@5", "other@5", f"{RUN}@12", f"{RUN}@x"]


def test_a_run_whose_ranks_are_here_is_not_deleted() -> None:
    """Nor one that is being saved; the in-memory checkpoint of one whose ranks have gone is dropped."""
    with saver_world() as world:
        rank = world.saved(1)
        world.checked()
        assert world.control.record_queue.recorded(30)
        trash = world.control.trash
        for dry_run in (True, False):
            with pytest.raises(InUse, match="connected"):
                delete_run(trash, world.saver, world.arena, RUN, dry_run=dry_run)
        assert world.committed() == [1]
        rank.leave()
        made = delete_run(trash, world.saver, world.arena, RUN)
        assert made.checkpoints == 1 and not world.arena.has(RUN) and world.saver.connected.lives() == {}
        assert world.committed() == [] and [one.entry for one in trash.entries()] == [made.entry]
        world._launches = 0
        (again,) = world.launch(1)  # with the launch ID of before
        with pytest.raises(InUse, match="connected"):
            undelete_run(trash, world.saver, world.arena, RUN)
        assert world.committed() == [] and len(trash.entries()) == 1
        again.leave()


def test_names_in_the_trash() -> None:
    for run, ms in (("a", 0), ("a.b-c_9", 1_900_000_000_000)):
        entry = naming.trash_entry(run, ms)
        assert naming.parse_trash_entry(entry) == (run, ms)
        assert (
            naming.is_purged_entry(naming.purged_entry(entry))
            and naming.parse_trash_entry(naming.purged_entry(entry)) is None
        )
    for name in ("", "a", "@1", "a@", "a@b", "../x@1", "a@1@2@"):
        assert naming.parse_trash_entry(name) is None
    with pytest.raises(CheckpointError):
        naming.trash_entry("../x", 1)


def test_what_is_let_in_before_a_deletion_and_done_after_it_makes_no_other_run(root: Root) -> None:
    """Whatever of it was looked at before: the run is deleted, so it has no file, and the catalog hears nothing."""
    catalog = root.control.rotation._catalog
    entry = root.trash.delete(RUN)
    for change in ({"owner": "ann"}, {"pins": (1,)}, {"policy": RetentionPolicy(last=1)}):
        with pytest.raises(NoSuchRun, match="deleted in the meantime"):
            root.control.rotation.files.change(RUN, lambda file, made=change: file.model_copy(update=made))  # type: ignore[misc]
    run_settings.note(catalog, RUN, run_settings.RunSettings(owner="ann"), known_only=True)
    assert not root.tier.list(RUN) and not root.listed()
    assert [one.entry for one in root.trash.entries()] == [entry.entry]
    root.trash.undelete(RUN)
    assert root.control.rotation.files.change(RUN, lambda file: file.model_copy(update={"owner": "bo"})).owner == "bo"


def test_a_run_without_a_directory_gets_a_file_unless_it_is_being_deleted(root: Root) -> None:
    """A launch that has saved nothing is a run; while it is deleted, nobody makes its directory."""
    files = root.control.rotation.files
    root.control.launches.declare("new-run", "launch", 1, None)
    assert not root.tier.list("new-run")
    with files.leaving("new-run"), pytest.raises(NoSuchRun):
        files.change("new-run", lambda file: file.model_copy(update={"owner": "ann"}))
    files.change("new-run", lambda file: file.model_copy(update={"owner": "ann"}))
    assert root.tier.list("new-run") == [naming.RUN_FILE]


def test_what_is_set_while_a_run_is_deleted_makes_no_other_run(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turn comes after the deletion: it is refused, and nothing stands there that nobody saved."""
    files = root.control.rotation.files
    read, asked = files.read, []

    def slow(run: str) -> RunFile:
        found = read(run)
        if not asked:
            asked.append(run)
            root.trash.delete(RUN)
        return found

    monkeypatch.setattr(files, "read", slow)
    with pytest.raises(NoSuchRun, match="deleted in the meantime"):
        files.change(RUN, lambda file: file.model_copy(update={"owner": "ann"}))
    assert not root.stands() and not root.tier.list(RUN)
    root.trash.undelete(RUN)
    assert root.stands() and read(RUN).owner == ""

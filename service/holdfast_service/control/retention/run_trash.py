"""The trash of a root: deleted runs, complete, that can be restored for a time. durability.md has the order.

A run is deleted by one rename of its directory, and restored by another: before and after each it is either complete or in
the trash. What follows, in the catalog and among attempts, is repeated by the next start. Nothing in the trash is listed,
restored by a launch, counted as used, or read; when a save finds no room on the disk, the trash goes first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime, timezone
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from holdfast_files.opened import read_bounded
from holdfast_formats import naming, timestamps
from holdfast_formats.errors import AlreadyCommitted, CatalogUnavailable, CheckpointError, InUse, NoSpace, NoSuchResource
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest import bodies
from holdfast_formats.rest.runs import Trash, TrashedRun
from holdfast_formats.timestamps import later, seconds_of, utc_now
from holdfast_service.control.catalog import attempts
from holdfast_service.control.catalog.attempts import Attempts, RunAttempts
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints import replicas, roots
from holdfast_service.control.database.visible import visible
from holdfast_service.control.retention import run_removal
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.control.retention.trash_ages import Ages, TrashAges
from holdfast_service.control.signals import Signal
from holdfast_service.storage import Records, Store

log = logging.getLogger(__name__)

KEPT_DAYS = 7.0
DAY_S = 86_400.0
NOTE_BYTES_MAX = 65_536
_Count = Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]


def _time(text: str) -> str:
    timestamps.read(text)
    return text


class _Note(BaseModel):
    """deleted.json: what was deleted. It is written before the run's rename and goes with it."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    run: str
    deleted: Annotated[str, AfterValidator(_time)]
    checkpoints: _Count
    newest: _Count | None
    bytes: _Count
    attempt: _Count
    launch: str | None  # the newest one: the run's present attempts are the deleted run's if they include it


class RunTrash:
    """Thread-safe. The caller ensures that no rank can join the run meanwhile (`daemon/saving/run_deletion.py`)."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        records: Records,
        store: Store,
        catalog: Catalog,
        attempts: Attempts,
        rotation: Rotation,
        events: Events,
        later: Callable[[str, Callable[[], object]], None],
        forgotten: Callable[[str], None],
        days: float | None = KEPT_DAYS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`later` runs what it is given after what waits to be recorded. `forgotten`: the run is another one from now on, or
        none.
        """
        self._records, self._store, self._catalog = records, store, catalog
        self._attempts, self._rotation, self._events, self._clock = attempts, rotation, events, clock
        self._ages = TrashAges(records)
        self._kept: set[str] = set()  # entries whose refused removal was reported
        self._owed: dict[str, _Note] = {}  # deleted runs that the catalog still lists, also if their entries are gone
        self._later, self._forgotten, self.days = later, forgotten, days
        self.restored: Signal[[Collection[CheckpointId]]] = Signal()  # these are to be read back

    def entries(self) -> list[TrashedRun]:
        """All entries that can be restored, the newest first."""
        ages = self._ages.read() if self.days is not None else None
        found = [entry for name in self._records.list(naming.RUN_TRASH) if (entry := self._entry(name, ages)) is not None]
        return sorted(found, key=lambda entry: entry.entry.rpartition("@")[2].zfill(15), reverse=True)

    def seen(self) -> Trash:
        """The visible entries, and their bytes."""
        items = [entry for entry in self.entries() if visible(entry.run)]
        return Trash(items=items, bytes=sum(entry.bytes for entry in items), days=self.days)

    def delete(self, run: str, marked: bool = False, dry_run: bool = False) -> TrashedRun:
        """Move a run to the trash; with `dry_run` only return what that would be. Pinned and labelled checkpoints are
        included if they may be (`marked`).

        Raises `NoSuchRun`, `Pinned`, or `InUse` with the reason.
        """
        known = self._catalog.run(run)
        run_removal.refuse_foreign(self._store, run)
        with self._rotation.deciding(run):
            run_removal.refuse(self._catalog, self._rotation, run, marked)
            trashed = self._told(naming.trash_entry(run, int(self._clock() * 1000)), self._noted(run, known))
            if dry_run:
                return trashed
            with self._rotation.files.leaving(run):
                if self._records.list(run):
                    trashed = self.put_away(run, known)  # it is deleted
                self._owed[run] = note = self._noted(run, known)
                with self._catalog.database.told_later(f"{run} was deleted"):
                    self._forget(run)
                if run in self._owed:  # what waits to be recorded would have it listed again
                    self._later(f"that {run} was deleted", lambda: self._forget_recorded(note))
        text = f"the run was deleted: {known.checkpoints} checkpoints, {known.bytes} bytes"
        self._events.add("run-deleted", text, run, level="warning", entry=trashed.entry, bytes=known.bytes)
        log.warning("%s: %s; `holdfast undelete %s` brings it back", run, text, run)
        return trashed

    def put_away(self, run: str, known: bodies.Run) -> TrashedRun:
        """A deletion's part on the disk, while deciding about the run; `known` are its contents."""
        note = self._noted(run, known)
        path, encoded = f"{run}/{naming.DELETED_FILE}", note.model_dump_json(indent=1).encode() + b"\n"
        try:
            self._records.replace(path, encoded)
        except NoSpace:  # deletions must work on a full disk
            if not self.make_room(NOTE_BYTES_MAX, f"the deletion of {run}"):
                raise
            self._records.replace(path, encoded)
        self._rotation.still_deciding()
        with self._rotation.files.exclusively(run):
            return self._told(self._put_away(run), note)

    def _put_away(self, run: str) -> str:
        """Its name in the trash. Renamed back where this process was suspended just before: the run may be in use by now."""
        name = self._moved(run)
        try:
            self._rotation.still_deciding()
        except CatalogUnavailable:
            with suppress(AlreadyCommitted):  # there is a new run of its name: this one stays in the trash, whole
                self._store.take_out(name, run)
                self._records.remove_file(f"{run}/{naming.DELETED_FILE}")
            raise
        return name

    def undelete(self, run: str, entry: str | None = None) -> TrashedRun:
        """Restore a run, by default its newest deletion; it is read back again before it counts as verified.

        Raises `NoSuchResource` if it is not in the trash, `InUse` if there is a run of this name.
        """
        entry_found = self._find(naming.check_run(run), entry)
        with self._rotation.deciding(run):
            note = _note(self._records, f"{naming.RUN_TRASH}/{entry_found.entry}")
            is_its = note is not None and self._has_attempts_of(note)  # the catalog has not heard of the deletion yet
            run_removal.going_on(self._catalog, run)
            is_another = not is_its and (self._attempts.newest(run) > 0 or self._is_listed(run))
            if self._records.list(run) or is_another:
                raise InUse(
                    f"there is now another run {run!r}", hint=f"delete that one first: `holdfast rm {run}` keeps it too"
                )
            try:
                self._store.take_out(entry_found.entry, run)  # it is back
            except NoSuchResource as error:
                raise _not_there(run) from error
            self._settle(run)
            with self._catalog.database.told_later(f"{run} was brought back"):
                for problem in roots.list_run(self._store, self._catalog, run):
                    log.error("cannot read %s@%s: %s", problem.run, problem.step, problem.error.detail)
        standing = roots.committed(self._store, run)
        with self._catalog.database.told_later(f"copies of {run} are used again"):
            replicas.returned(self._catalog.database, run, standing)
        self.restored.publish([CheckpointId(run, step) for step in standing])
        self._events.add("run-undeleted", "the run was brought back from the trash", run, entry=entry_found.entry)
        return entry_found

    def empty(self, run: str, entry: str | None = None) -> list[TrashedRun]:
        """Remove a run's entries, or one of them, for good; `NoSuchResource` if there is none."""
        entries = [one for one in self.entries() if one.run == run and entry in (None, one.entry)]
        if not entries:
            raise _not_there(run)
        return [one for one in entries if self._purge(one, "on request")]

    def expire(self) -> list[str]:
        """Remove for good what has been in the trash for long enough, whatever clocks jump, and finish such removals;
        returns the entries.
        """
        self._finish()
        days = self.days
        if days is None:
            return []
        entries = self.entries()
        ages = self._ages.update(self._clock(), {one.entry: seconds_of(one.deleted) for one in entries})
        due = [one for one in entries if ages[one.entry] >= days * DAY_S]
        return [one.entry for one in due if self._may_go(one) and self._purge(one, f"it was deleted {days:g} days ago")]

    def make_room(self, free_bytes: int, whom: str) -> bool:
        """Remove the oldest entries for good until so many bytes are free; False if that is not enough."""
        self._finish()
        for one in reversed(self.entries()):
            if self._has_room(free_bytes):
                break
            if self._may_go(one):
                self._purge(one, f"the disk had no room for {whom}", "warning")
        return self._has_room(free_bytes)

    def _has_room(self, free_bytes: int) -> bool:
        free = self._store.free_bytes()
        return free is None or free >= free_bytes

    def recover(self) -> None:
        """Finish, or undo, what a crash has interrupted; called when the catalog answers."""
        for run in filter(naming.is_run_name, self._records.list("")):
            if naming.DELETED_FILE in self._records.list(run):
                with self._rotation.deciding(run):  # no deletion is in progress now
                    if naming.DELETED_FILE in self._records.list(run):
                        self._settle(run)
        for note in (*self._owed.values(), *_notes(self._records)):
            if not self._records.list(note.run) and self._has_attempts_of(note):
                with self._rotation.deciding(note.run):
                    if not self._records.list(note.run) and self._has_attempts_of(note):
                        self._forget(note.run)
                        log.info("%s was deleted: its records were removed from the catalog", note.run)

    def _noted(self, run: str, known: bodies.Run) -> _Note:
        launches = self._attempts.known().get(run)
        return _Note(
            run=run,
            deleted=utc_now(),
            checkpoints=known.checkpoints,
            newest=known.newest,
            bytes=known.bytes,
            attempt=max(known.attempt, 0 if launches is None else launches.attempt),
            launch=next(reversed(launches.launches), None) if launches is not None and launches.launches else None,
        )

    def _has_attempts_of(self, note: _Note) -> bool:
        return _is_of(note, self._attempts.known().get(note.run))

    def _moved(self, run: str) -> str:
        """Its name in the trash."""
        at = int(self._clock() * 1000)
        while True:
            name = naming.trash_entry(run, at)
            try:
                self._store.put_away(run, name)
            except AlreadyCommitted:
                at += 1
                continue
            return name

    def _forget(self, run: str) -> None:
        """The catalog first, because attempts must never be lower than the catalog's."""
        run_removal.forget(self._catalog, run)
        self._attempts.forget(run)
        self._owed.pop(run, None)
        self._forgotten(run)

    def _forget_recorded(self, note: _Note) -> None:
        with self._rotation.deciding(note.run):
            if not self._records.list(note.run) and (self._has_attempts_of(note) or not self._attempts.newest(note.run)):
                self._forget(note.run)

    def _settle(self, run: str) -> None:
        """The run exists and is not deleted: keep its attempt numbers from being given out again."""
        note = _note(self._records, run)
        self._forgotten(run)
        if note is not None:
            self._attempts.saw(run, note.attempt)
        self._records.remove_file(f"{run}/{naming.DELETED_FILE}")

    def _is_listed(self, run: str) -> bool:
        known = self._catalog.known_runs().get(run)
        return known is not None and (known.attempt > 0 or bool(self._catalog.stamps(run)))

    def _find(self, run: str, entry: str | None) -> TrashedRun:
        entry_found = next((one for one in self.entries() if one.run == run and entry in (None, one.entry)), None)
        if entry_found is None:
            raise _not_there(run)
        return entry_found

    def _may_go(self, one: TrashedRun) -> bool:
        """Whether the deleted run was not replaced, or by something sound; else it stays, with an event."""
        try:
            steps = self._store.steps(one.run)
            if not steps or any(self._rotation.proofs.stands(one.run, step) for step in reversed(steps)):
                self._kept.discard(one.entry)
                return True
        except CatalogUnavailable as away:
            log.info("%s stays in the trash for now: %s", one.entry, away.detail)
            return False
        if one.entry not in self._kept:
            self._kept.add(one.entry)
            text = f"the deleted run stays in the trash: the current run {one.run} has no sound checkpoint"
            self._events.add("removal-waits", text, one.run, level="error", entry=one.entry)
        return False

    def _purge(self, one: TrashedRun, why: str, level: Literal["info", "warning"] = "info") -> bool:
        if not self._store.purge(one.entry):  # another node was faster, or it was brought back
            return False
        self._finish()
        text = f"the deleted run was removed for good: {why}"
        self._events.add("run-purged", text, one.run, level=level, entry=one.entry, bytes=one.bytes)
        log.warning("%s: %s (%d bytes)", one.run, text, one.bytes)
        return True

    def _finish(self) -> None:
        for name, error in self._store.free_purged():
            log.warning("could not delete all of %s; trying again later: %s", name, error.detail)

    def _entry(self, name: str, ages: Ages | None) -> TrashedRun | None:
        if (trash_entry := naming.parse_trash_entry(name)) is None:
            return None
        note = _note(self._records, f"{naming.RUN_TRASH}/{name}")
        if note is None or note.run != trash_entry[0]:  # a foreign directory
            return None
        return self._told(name, note, ages)

    def _told(self, name: str, note: _Note, ages: Ages | None = None) -> TrashedRun:
        since, age = note.deleted, 0.0
        if ages is not None and name in ages.seconds:
            since, age = (
                timestamps.write(datetime.fromtimestamp(ages.at, timezone.utc)),
                ages.seconds[name],
            )  # to be counted on
        expires = None if self.days is None else later(since, max(self.days * DAY_S - age, 0.0))
        values = note.model_dump(exclude={"format", "launch"})
        return TrashedRun(entry=name, expires=expires, **values)


def forget_deleted(records: Records, catalog: Catalog) -> None:
    """Before a comparison by a program that is no daemon: forget the runs in the trash that the catalog lists still."""
    declared = {**catalog.declared(), **(attempts.read(records, naming.ATTEMPTS) or {})}
    for note in _notes(records):
        if not records.list(note.run) and _is_of(note, declared.get(note.run)):
            run_removal.forget(catalog, note.run)


def _notes(records: Records) -> list[_Note]:
    """Those of the runs in the trash."""
    entries = [name for name in records.list(naming.RUN_TRASH) if naming.parse_trash_entry(name)]
    found = (_note(records, f"{naming.RUN_TRASH}/{name}") for name in entries)
    return [note for note in found if note is not None]


def _note(records: Records, directory: str) -> _Note | None:
    path = f"{directory}/{naming.DELETED_FILE}"
    try:
        data = read_bounded(records, path, NOTE_BYTES_MAX)
        return None if data is None else _Note.model_validate_json(data)
    except (ValidationError, CheckpointError) as error:
        log.error("cannot read %s: %s", path, str(error)[:200])
        return None


def _is_of(note: _Note, known: RunAttempts | None) -> bool:
    """Whether these attempts of a run are the deleted run's, and not those of a later launch."""
    if known is None or known.attempt > note.attempt:
        return False
    return not known.launches if note.launch is None else note.launch in known.launches


def _not_there(run: str) -> NoSuchResource:
    return NoSuchResource(f"the trash holds no run {run!r}", hint="list its contents with `holdfast trash`")

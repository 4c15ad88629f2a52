"""Rename a run. Manifests contain the name of their run, so its checkpoints get new manifests, and its files second names
(hard links): no tensor byte is copied. durability.md has the order.

The run of the new name appears by one rename, complete; the old one goes to the trash by another. A kill between the two
leaves both; the next start finishes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy import delete, update

from holdfast_files.opened import read_bounded
from holdfast_formats import naming
from holdfast_formats.disk import manifests
from holdfast_formats.errors import (
    AlreadyCommitted,
    CatalogUnavailable,
    CheckpointError,
    Damaged,
    InUse,
    InvalidRequest,
    NoSpace,
    NoSuchCheckpoint,
    StorageFailed,
)
from holdfast_formats.rest.runs import RenamedRun
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.catalog import ANY_FILES, Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.database.run_rows import lock_run
from holdfast_service.control.database.schema import RunRow
from holdfast_service.control.retention import run_removal
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.control.retention.run_trash import RunTrash
from holdfast_service.storage import RootStorage, Tier

log = logging.getLogger(__name__)

MARK_BYTES_MAX = 65_536
_MOVED = (naming.RUN_FILE, naming.LAUNCHES_FILE)


class _Mark(BaseModel):
    """renamed.json of the run under its new name, until the old one is gone."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    old: str
    attempt: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]


class RunRenaming:
    """Thread-safe. The caller ensures that no rank can join either run (`daemon/saving/run_deletion.py`)."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        storage: RootStorage,
        catalog: Catalog,
        attempts: Attempts,
        rotation: Rotation,
        trash: RunTrash,
        events: Events,
        renamed: Callable[[str], None],
        *,
        is_alone: bool,
    ) -> None:
        """`renamed`: this run is another one from now on, or none. `is_alone`: no other daemon serves the root."""
        self._storage, self._catalog, self._attempts = storage, catalog, attempts
        self._rotation, self._trash, self._events = rotation, trash, events
        self._renamed, self._is_alone = renamed, is_alone

    @property
    def _directory(self) -> Tier:
        return self._storage.directory("renaming a run")

    def rename(self, run: str, name: str, dry_run: bool = False) -> RenamedRun:
        """Rename a run; with `dry_run` only check whether that would work. Returns the former run. Damaged checkpoints are
        moved as they are: they may be repaired under the new name.

        Raises `NoSuchRun`, `InUse` or `Pinned` with the reason, `AlreadyCommitted` if there is a run of the new name, and
        `InvalidRequest` where it is impossible: several daemons serve the root, it is no directory, or its storage has no
        hard links.
        """
        known = self._catalog.run(run)
        naming.check_run(name)
        if not self._is_alone:
            raise InvalidRequest(
                "a run cannot be renamed while several daemons share the root",
                hint="stop all daemons except one, or import its checkpoints under the other name",
            )
        self._storage.directory("renaming a run")
        run_removal.refuse_foreign(self._storage.store, run)
        built: object = None
        damaged = self._damaged(run)
        renamed = RenamedRun(**known.model_dump(), damaged={step: error.detail for step, error in damaged.items()})
        if not dry_run:
            with self._rotation.deciding(run):  # what refuses it refuses it before anything is made
                self._refuse(run, name)
            built = self._build(run, name, known.attempt)
        with self._rotation.deciding(run):
            self._refuse(run, name)
            if dry_run:
                return renamed
            if built != self._contents(run):
                raise InUse(f"{run} was changed during the renaming", hint="try again")
            self._catalog.database.check_writable()  # while nothing can be seen of it
            if self._storage.records.list(run):
                self._directory.publish(_staged(name), name)  # from here on there is the run of the new name, complete
            try:
                self._finish(run, name)
            except (CatalogUnavailable, NoSpace) as error:
                self._catalog.database.missed.publish()
                hint = f"do not train {run} now: it will be renamed when the catalog is writable again"
                raise type(error)(error.detail, hint=hint) from error
        self._events.add("run-renamed", f"the run {run} was renamed to {name}", name, old=run)
        log.warning("the run %s was renamed to %s", run, name)
        for step, damage in damaged.items():
            self._rotation.proofs.discoveries.damaged.publish(name, step, damage, ANY_FILES)
        return renamed

    def _damaged(self, run: str) -> dict[int, Damaged]:
        """Its checkpoints with missing parts, by step."""
        damaged: dict[int, Damaged] = {}
        for step in self._storage.store.steps(run):
            try:
                self._rotation.probe.probe(run, step)
            except Damaged as error:
                damaged[step] = error
            except NoSuchCheckpoint:
                continue  # an empty directory, or removed at this moment
        return damaged

    def _refuse(self, run: str, name: str) -> None:
        run_removal.refuse(self._catalog, self._rotation, run, marked=True)
        run_removal.refuse_lone_copies(self._catalog, self._rotation, run)
        for place in self._storage.store.replaced(run):
            if self._rotation.probe.is_whole(place):  # it may have to come back, under this name
                raise InUse(
                    f"step {place.step} of {run} was replaced, and its replacement has not been verified yet",
                    hint="try again in a minute",
                )
        if self._storage.records.list(name) or self._attempts.newest(name) or name in self._catalog.known_runs():
            raise AlreadyCommitted(
                f"there is already a run {name!r}", hint=f"choose another name, or delete it first: `holdfast rm {name}`"
            )

    def recover(self) -> None:
        """Remove incomplete runs, and finish complete ones; called when the catalog answers."""
        for name in self._storage.records.list(naming.RENAMING):
            self._directory.remove_tree(_staged(name))
        for name in filter(naming.is_run_name, self._storage.records.list("")):
            mark = self._mark(name) if naming.RENAMED_FILE in self._storage.records.list(name) else None
            if mark is None:
                continue
            with self._rotation.deciding(mark.old):
                if self._storage.records.list(mark.old) and self._is_untouched(mark):
                    self._finish(mark.old, name)
                    log.info("finished the renaming of %s to %s", mark.old, name)
                else:  # it is finished, or the old one was trained since: that one stays
                    self._attempts.saw(name, mark.attempt)
                    self._storage.records.remove_file(f"{name}/{naming.RENAMED_FILE}")

    def _is_untouched(self, mark: _Mark) -> bool:
        """Whether the old run was not trained since: it has no new launches, or its launches were moved already."""
        known = self._attempts.known().get(mark.old)
        return known is None or known.attempt == mark.attempt or (known.attempt < mark.attempt and not known.launches)

    def _contents(self, run: str) -> object:
        """What differs once the run was changed: its checkpoints, and its settings."""
        files = [self._storage.records.stamp(f"{run}/{file}") for file in _MOVED]
        return self._storage.store.stamps(run), files

    def _build(self, run: str, name: str, attempt: int) -> object:
        """Build the complete run in a hidden place; returns the run's contents at the start."""
        staging, built, records = _staged(name), self._contents(run), self._storage.records
        self._directory.remove_tree(staging)
        for step in self._storage.store.steps(run):
            self._checkpoint(run, name, step)
        for file in _MOVED:
            if records.size(f"{run}/{file}") is not None:
                self._directory.put(f"{staging}/{file}", records.read(f"{run}/{file}"))
        mark = _Mark(old=run, attempt=max(attempt, self._attempts.newest(run)))
        self._directory.put(f"{staging}/{naming.RENAMED_FILE}", mark.model_dump_json().encode() + b"\n")
        if self._storage.records.list(f"{staging}/{naming.CHECKPOINTS}"):
            self._directory.sync_directory(f"{staging}/{naming.CHECKPOINTS}")
        self._directory.sync_directory(staging)
        return built

    def _checkpoint(self, run: str, name: str, step: int) -> None:
        """Link its files. Without a readable manifest, they are moved as they are."""
        source, target = naming.checkpoint_path(run, step), f"{naming.RENAMING}/{naming.checkpoint_path(name, step)}"
        try:
            manifest = msgspec.structs.replace(roots.load_manifest(self._storage.records, run, step), run=name)
        except NoSuchCheckpoint:
            return
        except Damaged:
            manifest = None
        names = self._storage.records.list(source) if manifest is None else [file.name for file in manifest.files]
        for file in names:
            if self._storage.records.size(f"{source}/{file}") is None:
                continue  # it is missing; reported already
            if not self._directory.link(f"{source}/{file}", f"{target}/{file}"):
                raise InvalidRequest(
                    f"{run} cannot be renamed: its storage does not support hard links",
                    hint="import its checkpoints under the other name, then delete it",
                )
        if manifest is not None:
            manifests.validate(manifest)
            encoded = manifests.encode(manifest)
            self._directory.put(f"{target}/{naming.MANIFEST}", encoded)
            self._directory.put(f"{target}/{naming.COMMIT}", manifests.encode_commit(manifest, encoded))
        if self._storage.records.list(target):
            self._directory.sync_directory(target)

    def _finish(self, run: str, name: str) -> None:
        """Rename it in the catalog; then in the attempts, durably; then move the old run to the trash."""
        self._refuse_incomplete(run, name)
        self._move_rows(run, name)
        self._prove_again(run, name)
        self._attempts.rename(run, name)
        self._renamed(run)
        self._renamed(name)
        if self._storage.records.list(run):
            self._trash.put_away(run, self._catalog.run(name))
        if naming.RENAMED_FILE in self._storage.records.list(name):
            for problem in roots.list_run(self._storage.store, self._catalog, name):
                log.error("cannot read %s@%s: %s", problem.run, problem.step, problem.error.detail)
            self._storage.records.remove_file(f"{name}/{naming.RENAMED_FILE}")

    def _refuse_incomplete(self, run: str, name: str) -> None:
        """`StorageFailed` if the renamed run lacks something that the old one has, which then stays."""
        probe = self._rotation.probe
        lacking = [s for s in self._storage.store.steps(run) if probe.proof(run, s) and not probe.proof(name, s)]
        if lacking:
            raise StorageFailed(
                f"{run} is kept: its new name {name} lacks some of the steps {lacking[:10]}",
                hint=f"delete {name} with `holdfast rm {name}`, and rename {run} again",
            )

    def _prove_again(self, run: str, name: str) -> None:
        """Carry read-backs over: only COMMIT and manifest are other files."""
        probe = self._rotation.probe
        for step, known in self._catalog.proofs(name).items():
            if known.proven is not None and known.proven == probe.proof(run, step):
                self._catalog.prove(name, step, probe.proof(name, step))

    def _move_rows(self, run: str, name: str) -> None:
        """Move a run's rows and its checkpoints' results to its new name. Copies in replicas get it too, then the old ones
        are removed.
        """
        if run not in self._catalog.known_runs():  # an earlier start has moved them
            return
        run_removal.forget(self._catalog, name)
        with self._catalog.database.write() as session:
            old, new = lock_run(session, run), lock_run(session, name)
            for column in RunRow.__table__.columns:
                if column.key != "name":
                    setattr(new, column.key, getattr(old, column.key))
            session.flush()
            for table in run_removal.OF_A_RUN:
                session.execute(delete(table).where(table.run == name))
                session.execute(update(table).where(table.run == run).values(run=name))
        self._catalog.renamed(run, name)
        run_removal.forget(self._catalog, run, heir=name)

    def _mark(self, run: str) -> _Mark | None:
        path = f"{run}/{naming.RENAMED_FILE}"
        try:
            data = read_bounded(self._storage.records, path, MARK_BYTES_MAX)
            return None if data is None else _Mark.model_validate_json(data)
        except (ValidationError, CheckpointError) as error:
            log.error("cannot read %s: %s", path, str(error)[:200])
            return None


def _staged(name: str) -> str:
    return f"{naming.RENAMING}/{name}"

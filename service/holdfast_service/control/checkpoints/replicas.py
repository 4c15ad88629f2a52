"""Replicas in the catalog: what is to be copied to which one, what exists there, and what must be removed there.

A copy is removed only after its checkpoint was *removed*: a checkpoint that is missing, because its disk is, keeps
it. One of a renamed run is removed only after there is one under the new name.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from itertools import chain
from typing import Any

from sqlalchemy import ColumnElement, Select, delete, func, select, update
from sqlalchemy.orm import Session, aliased

from holdfast_files.opened import read_bounded
from holdfast_formats import lineage, naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import (
    AlreadyCommitted,
    CatalogUnavailable,
    CheckpointError,
    Damaged,
    NoSuchCheckpoint,
    NotFound,
    StateMismatch,
)
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId, Place
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Replica
from holdfast_service.control.catalog import losses
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.checkpoints import commit, removal, roots
from holdfast_service.control.checkpoints.lost_copies import COUNTED, LostCopies
from holdfast_service.control.checkpoints.other_roots import OtherRoots
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RUN_FILE_BYTES_MAX
from holdfast_service.control.checkpoints.storage_probe import StorageProbe
from holdfast_service.control.checkpoints.tiers import has_copy
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow, RunRow
from holdfast_service.control.nodes import Nodes, repairing
from holdfast_service.control.signals import Signal
from holdfast_service.storage import Records, RootStorage, Store

log = logging.getLogger(__name__)

DUE_MAX = 100  # of one look; the next look finds the others
_NOT_OURS = (AlreadyCommitted.code, StateMismatch.code)  # problems of copies that this root has not made
_SETTLED = ("present", "damaged", "gone")


class ReplicaRecords:
    """The replicas of one root, whose control files are `root`. Thread-safe; each replica has one worker."""

    def __init__(
        self, root: Records, catalog: Catalog, events: Events, attempts: Attempts, readers: Readers | None = None
    ) -> None:
        """What the `readers` read is not removed from a replica either: it may be that copy."""
        self._root, self._catalog, self._database = root, catalog, catalog.database
        self._attempts, self.readers = attempts, readers or Readers()
        self._events = events
        self._probe = StorageProbe(root)
        self.lost = LostCopies(catalog.database, events)
        self.others = OtherRoots(catalog.database, attempts, events)
        self._kept: set[tuple[str, str, int]] = set()  # copies whose refused removal was reported
        self.copied: Signal[[str]] = Signal()  # a run, of which there is a new copy

    def opened(self, name: str, replica: RootStorage, begun: Collection[Place] = (), *, begins: bool = False) -> None:
        """A replica became reachable: sweep what earlier copies left, except those that are `begun`, and update the catalog
        from it, as `look` does.
        """
        store = replica.store
        store.put_back(lambda run: nullcontext())
        for path in store.sweep(begun):
            log.info("swept %s of replica %s", path, name)
        self.look(name, replica, begins)

    def look(self, name: str, replica: RootStorage, begins: bool = False) -> None:
        """Update the catalog from the lists of a replica: copies that are gone are due again. `begins`: the root begins with
        those runs of the replica that it has never had.
        """
        store = replica.store
        held = {run: list(store.stamps(run)) for run in roots.runs(replica.records)}
        if begins:
            self.others.tiers.add(name)
            for run, steps in held.items():
                self._begin_with(name, replica, run, steps)
        present = {(run, step) for run, steps in held.items() for step in steps}
        for run, steps in self.counted(name).items():
            if missing := [step for step in steps if (run, step) not in present]:
                self.lost.gone(name, run, missing)
        with self._database.write() as session:
            for row in session.scalars(select(ReplicaRow).where(ReplicaRow.tier == name)):
                which = (row.run, row.step)
                if which in present and row.state in _SETTLED:
                    present.remove(which)
                else:
                    session.delete(row)
            known = {(run, step) for run, step in session.execute(select(CheckpointRow.run, CheckpointRow.step))}
        found: dict[str, list[Manifest]] = {}
        for run, step in sorted(present - known):  # the worker looks at the others itself: they are due
            manifest = self._found(name, store.files, run, step)
            if manifest is not None:
                found.setdefault(run, []).append(manifest)
        for run, manifests in found.items():
            self.others.found(name, run, manifests)

    def counted(self, name: str) -> dict[str, list[int]]:
        """The copies that are expected to be in a replica, by run."""
        rows = select(ReplicaRow.run, ReplicaRow.step).where(ReplicaRow.tier == name, ReplicaRow.state.in_(COUNTED))
        found: dict[str, list[int]] = {}
        with self._database.read() as session:
            for run, step in session.execute(rows):
                found.setdefault(run, []).append(step)
        return found

    def _begin_with(self, name: str, replica: RootStorage, run: str, steps: Sequence[int]) -> None:
        """Know a run of a replica as if it had been launched here: its attempts, which later launches exceed (I6), and its
        run file. Its checkpoints stay where they are until one of them is restored.
        """
        with self._database.read() as session:
            known = session.get(RunRow, run) is not None
        if known or self._attempts.newest(run) or not steps:
            return
        manifests = []
        for step in steps:
            with suppress(Damaged, NoSuchCheckpoint):
                manifests.append(roots.load_manifest(replica.store.files, run, step))
        attempt = max((manifest.attempt for manifest in manifests), default=0)
        path = f"{run}/{naming.RUN_FILE}"
        data = read_bounded(replica.records, path, RUN_FILE_BYTES_MAX)
        if data is not None:
            self._root.put_first(path, data)
        self._attempts.saw(run, max(attempt, 1))
        self._attempts.saw_elsewhere(run, {manifest.attempt for manifest in manifests}, lineage.way(manifests))
        self._catalog.note_attempts(self._attempts.known([run]))
        text = f"{run} is known from replica {name}, which has {len(steps)} of its checkpoints"
        self._events.add("run-found", text, run, tier=name, attempt=attempt)
        log.warning("%s", text)

    def has_drained_to(self, name: str) -> bool:
        """Whether this root has ever copied to a replica, so that it knows the runs there without asking."""
        with self._database.read() as session:
            return session.scalar(select(ReplicaRow.run).where(ReplicaRow.tier == name).limit(1)) is not None

    def removals(self, name: str) -> list[tuple[str, int]]:
        """Copies of checkpoints that were removed; those of a renamed run once there are copies under its new name. Where
        the step has a checkpoint again, brought back or saved again, it is read back first.
        """
        with self._database.read() as session:
            return [(run, step) for run, step in session.execute(_removable(name).limit(DUE_MAX))]

    def renames(self, name: str) -> list[tuple[CheckpointId, str]]:
        """Copies of renamed runs without a copy under the new name yet, with that name."""
        wanted = select(ReplicaRow.run, ReplicaRow.step, ReplicaRow.heir).where(*_gone(name), _awaits(name))
        order = wanted.order_by(ReplicaRow.heir, ReplicaRow.step.desc())
        with self._database.read() as session:
            return [(CheckpointId(run, step), heir) for run, step, heir in session.execute(order.limit(DUE_MAX)) if heir]

    def due(self, name: str) -> list[bodies.CheckpointInfo]:
        """Verified checkpoints without a copy in this replica, newest first."""
        order = (CheckpointRow.created.desc(), CheckpointRow.step.desc())
        wanted = select(CheckpointRow).where(CheckpointRow.verified, _not_settled(name)).order_by(*order).limit(DUE_MAX)
        with self._database.read() as session:
            checkpoints = [
                bodies.CheckpointInfo.model_validate(row, from_attributes=True) for row in session.scalars(wanted)
            ]
        return [checkpoint for checkpoint in checkpoints if checkpoint.damage is None]

    def wanted(self, name: str) -> set[CheckpointId]:
        """All checkpoints without a copy in this replica, verified or not."""
        where = (CheckpointRow.damage.is_(None), _not_settled(name))
        with self._database.read() as session:
            rows = session.execute(select(CheckpointRow.run, CheckpointRow.step).where(*where))
            return {CheckpointId(run, step) for run, step in rows}

    def stale(self, name: str, before: str) -> tuple[str, int] | None:
        """The copy that was read back longest ago, if that was before this time or never."""
        wanted = (
            select(ReplicaRow.run, ReplicaRow.step)
            .where(ReplicaRow.tier == name, ReplicaRow.state.in_(("present", "damaged")))
            .where((ReplicaRow.checked.is_(None)) | (ReplicaRow.checked < before))
            .order_by(func.coalesce(ReplicaRow.checked, ""), ReplicaRow.run, ReplicaRow.step)
        )
        with self._database.read() as session:
            row = session.execute(wanted.limit(1)).first()
        return None if row is None else (row[0], row[1])

    def publish(self, replica: RootStorage, place: Place, encoded: bytes, commit_bytes: bytes, over: bool = False) -> None:
        """Publish a proven copy and the run's file beside it, so that pins and policy exist when the copy is served.

        `over` replaces the existing copy, made before its checkpoint was thinned.
        """
        manifest = commit.publish_copy(replica.store, place, encoded, commit_bytes, over)
        path = f"{manifest.run}/{naming.RUN_FILE}"
        try:
            data = read_bounded(self._root, path, RUN_FILE_BYTES_MAX)
        except Damaged as error:  # the copy keeps the last one that could be read
            log.error("%s could not be copied to the replica: %s", path, error.detail)
            return
        if data is not None and not _holds(replica.records, path, data):
            replica.records.replace(path, data)

    def remove(self, name: str, store: Store, run: str, step: int) -> bool:
        """Remove a copy whose checkpoint was removed, in the order of I4. False if it stays, because every checkpoint that
        justified the removal is gone, because its checkpoint was brought back, or, for now, because it is being read.
        """
        with self.readers.removing(run, step) as free:
            return free and self._is_removable(name, run, step) and self._remove(name, store, run, step)

    def _is_removable(self, name: str, run: str, step: int) -> bool:
        with self._database.read() as session:
            return session.execute(_removable(name).where(*_row(name, run, step))).first() is not None

    def _remove(self, name: str, store: Store, run: str, step: int) -> bool:
        if not self._is_dispensable(name, store.files, CheckpointId(run, step)):
            self._report_kept(name, CheckpointId(run, step), "stays")
            return False
        try:
            left = removal.remove_checkpoint(store, run, step)
            if left is not None:
                log.warning("bytes of %s@%s stay in the trash of replica %s: %s", run, step, name, left.detail)
        except NoSuchCheckpoint:
            log.info("%s@%s was already gone from replica %s", run, step, name)
        with self._database.write() as session:  # in any state: its checkpoint may have been brought back meanwhile
            session.execute(delete(ReplicaRow).where(*_row(name, run, step)))
            _forget_deleted(session, run)
        return True

    def may_follow(self, name: str, files: Files, manifest: Manifest, copy: Manifest) -> bool:
        """Whether a copy may be replaced by its thinned checkpoint: a sound, newer or equal one must have the groups that it
        loses.
        """
        which = CheckpointId(manifest.run, manifest.step)
        if set(copy.groups) <= set(manifest.groups) or self._stands_elsewhere(name, files, which, copy):
            return True
        self._report_kept(name, which, "stays whole")
        return False

    def _report_kept(self, name: str, which: CheckpointId, how: str) -> None:
        if (name, *which) not in self._kept:
            self._kept.add((name, *which))
            why = f"no sound checkpoint of {which.run} with its groups is left"
            text = f"step {which.step} {how} in replica {name}: {why}"
            self._events.add("removal-waits", text, *which, "error", tier=name)

    def _is_dispensable(self, name: str, files: Files, which: CheckpointId) -> bool:
        """Whether a sound checkpoint with all groups of this copy exists, in the root or here, that is not older unless the
        removal was requested; or its run was deleted.
        """
        run, step = which
        with self._database.read() as session:
            row = session.get(ReplicaRow, (run, step, name))
            heir = run if row is None or row.heir is None else row.heir
            known = session.get(RunRow, heir)
            if known is None or (known.attempt == 0 and heir == run):
                return True
            requested = row is not None and row.requested
        try:
            copy = roots.load_manifest(files, run, step)
        except (Damaged, NoSuchCheckpoint):
            return True  # it cannot be restored
        return self._stands_elsewhere(name, files, CheckpointId(heir, step), copy, or_older=requested)

    def _stands_elsewhere(
        self, name: str, files: Files, which: CheckpointId, copy: Manifest, *, or_older: bool = False
    ) -> bool:
        """Whether a sound checkpoint of this run with the groups of this copy exists in the root, or another copy of one
        here, that is not older. Not one on a line that training has left.
        """
        run = which.run
        listed = [c for c in roots.all_checkpoints(self._catalog, run) if c.verified]
        same = (ReplicaRow.tier == name, ReplicaRow.run == run, ReplicaRow.state == "present")
        with self._database.read() as session:
            others = session.scalars(select(ReplicaRow.step).where(*same).order_by(ReplicaRow.step.desc()))
            copies = [at for at in others if at != which.step]
        in_the_root = (c for c in listed if self._probe.proof(run, c.step))
        probe = StorageProbe(files)
        here = (roots.load_manifest(files, run, at) for at in copies if probe.proof(run, at))
        standing: Iterator[bodies.CheckpointInfo | Manifest] = chain(in_the_root, here)
        needed = set(copy.groups)
        return any(
            needed <= set(checkpoint.groups) and (or_older or _is_not_older(checkpoint, copy)) for checkpoint in standing
        )

    def copying(self, name: str, which: bodies.CheckpointInfo) -> None:
        self._set(name, CheckpointId(which.run, which.step), state="copying", bytes=which.bytes)

    def present(self, name: str, which: CheckpointId, size: int, measured: Mapping[str, float] | None = None) -> None:
        """A copy exists and was read back. News are recorded as an event. `measured` is what making it cost."""
        now = self._now()
        cost = {"measured": dict(measured)} if measured is not None else {}
        before = self._set(name, which, state="present", bytes=size, checked=now, problem=None, **cost)
        if before != "present":
            text = f"step {which[1]} was copied to replica {name} and verified"
            self._events.add("checkpoint-replicated", text, *which, tier=name, bytes=size)
            self.copied.publish(which.run)

    def unreached(self, name: str, error: CheckpointError) -> None:
        """The replica is not writable; one event per problem."""
        text = f"replica {name} cannot be reached: {error.detail}"
        self._events.add("replica-failed", text, level="error", tier=name, problem=error.problem())

    def failed(self, name: str, which: CheckpointId, error: CheckpointError, damaged: bool) -> None:
        """A copy failed, or was found damaged; an event the first time, and for another problem."""
        state = {"state": "damaged", "checked": self._now()} if damaged else {"state": "copying"}
        with self._database.read() as session:
            row = session.get(ReplicaRow, (which[0], which[1], name))
            was_said = row is not None and row.problem is not None and row.problem.get("code") == error.code
        self._set(name, which, problem=error.problem(), **state)
        if not was_said:
            text = f"step {which[1]} in replica {name}: {error.detail}"
            self._events.add(
                "replica-failed", text, *which, "error" if damaged else "warning", tier=name, problem=error.problem()
            )

    def suspected(self, name: str, which: CheckpointId, error: Damaged) -> None:
        """A reader met damage in a copy: it is read back next, and does not count until then."""
        self.failed(name, which, error, damaged=True)
        self._set(name, which, checked=None)

    def _found(self, name: str, files: Files, run: str, step: int) -> Manifest | None:
        """A copy without a checkpoint in the root; when it was last read back is unknown. In a bucket it can be listed while
        its files are gone.
        """
        try:
            manifest = roots.load_manifest(files, run, step)
        except (Damaged, NoSuchCheckpoint) as error:
            self.failed(name, CheckpointId(run, step), error, damaged=True)
            return None
        self._set(name, CheckpointId(run, step), state="present", bytes=manifest.bytes)
        return manifest

    def _set(self, name: str, which: CheckpointId, **values: Any) -> str | None:
        """Change or insert a row; returns its previous state. Rows of removed copies stay as they are."""
        run, step = which
        with self._database.write() as session:
            row = session.get(ReplicaRow, (run, step, name), with_for_update=True)
            if row is None:
                if session.get(RunRow, run) is not None:  # of runs that this root never had the copies are not listed
                    defaults = {"bytes": 0, "since": self._now()}
                    session.add(ReplicaRow(run=run, step=step, tier=name, **(defaults | values)))
                return None
            before = row.state
            if before != "gone":
                state = values.get("state", before)
                since = row.since if state == before else self._now()
                if state == "present":  # also where the clock was set back since the commit: see `_not_settled`
                    listed = session.get(CheckpointRow, (run, step))
                    since = max(since, listed.created if listed is not None else "")
                session.merge(ReplicaRow(run=run, step=step, tier=name, **values, since=since))
            return before

    def _now(self) -> str:
        return self._events.now()


class RepairRecords:
    """The catalog's queries and records for repairs."""

    def __init__(
        self, storage: RootStorage, catalog: Catalog, events: Events, record_queue: RecordQueue, nodes: Nodes
    ) -> None:
        self._storage, self._catalog, self._events = storage, catalog, events
        self._record_queue, self._nodes = record_queue, nodes

    @contextmanager
    def repairing(self, run: str, step: int) -> Iterator[None]:
        """No other node repairs this checkpoint, in the same place of staging, for the length of the block; as far as the
        catalog can be asked. `CatalogUnavailable` if another one takes long.
        """
        with ExitStack() as held:
            try:
                held.enter_context(self._nodes.locked(repairing(run, step), asks=False))
            except CatalogUnavailable as away:
                if self._record_queue.trouble is None:
                    raise
                log.warning("%s@%s is repaired without the help of other nodes: %s", run, step, away.detail)
            yield

    def known(self, run: str, step: int) -> bodies.CheckpointInfo | None:
        try:
            return self._catalog.checkpoint(run, step)
        except NotFound:
            return None

    def unlisted(self) -> list[tuple[str, int]]:
        """Checkpoints in the root that are not sound: those that cannot be listed, and those listed as damaged."""
        wanted = select(CheckpointRow.run, CheckpointRow.step).where(CheckpointRow.damage.is_not(None))
        with self._catalog.database.read() as session:
            damaged = [(run, step) for run, step in session.execute(wanted.order_by(CheckpointRow.step.desc()))]
        return damaged + roots.unlisted(self._storage.store, self._catalog)

    def repaired(self, run: str, step: int, detail: dict[str, Any]) -> None:
        """A file of a checkpoint, or of its replica, was made again."""
        where = f"replica {detail['replica']}: " if "replica" in detail else ""
        text = f"{where}{detail['file']} of step {step} was repaired from {detail['source']}"
        self._events.add("checkpoint-repaired", text, run, step, "warning", **detail)

    def removed(self, run: str, step: int) -> set[str]:
        """The replicas that still have a copy of this removed checkpoint."""
        same = (ReplicaRow.run == run, ReplicaRow.step == step, ReplicaRow.state == "gone")
        with self._catalog.database.read() as session:
            return set(session.scalars(select(ReplicaRow.tier).where(*same)))

    def admit(self, manifest: Manifest) -> None:
        """`StateMismatch` for a checkpoint of an attempt unknown to this root: it would shut out all existing ones (I6)."""
        newest = self._catalog.newest_attempt(manifest.run)
        if newest and manifest.attempt > newest:
            raise StateMismatch(
                f"{manifest.run}@{manifest.step} was saved by attempt {manifest.attempt}, and this root has "
                f"recorded {newest} attempts: it is from another root, or from before this one was lost",
                hint="stop the daemon, and run `holdfast import REPLICA/"
                f"{naming.checkpoint_path(manifest.run, manifest.step)} {manifest.run}@{manifest.step} --root ROOT`; or "
                "train under another run name",
            )

    def bring(self, source: Files, label: str, place: Place, encoded: bytes, commit_bytes: bytes) -> None:
        """Publish a staged and proven checkpoint that was gone; with the run's file, if that is gone too."""
        path = f"{place.run}/{naming.RUN_FILE}"
        if self._storage.records.size(path) is None:
            data = read_bounded(source, path, RUN_FILE_BYTES_MAX)
            if data is not None:
                self._storage.records.replace(path, data)
        manifest = commit.publish_copy(self._storage.store, place, encoded, commit_bytes)
        stamp = roots.stamp(
            self._storage.store, place.run, place.step
        )  # else a comparison may take it for the one that was gone
        self._catalog.record_checkpoint(bodies.describe(manifest), stamp)
        detail: dict[str, Any] = {"file": naming.COMMIT, "source": label}
        text = f"step {manifest.step} was gone, and was copied back from {label}"
        self._events.add("checkpoint-repaired", text, manifest.run, manifest.step, "warning", **detail)
        self._events.add(
            "checkpoint-verified", f"step {manifest.step} was copied back and verified", manifest.run, manifest.step
        )

    def sound(self, run: str, step: int) -> None:
        """A checkpoint was read back whole: list it as verified and clear its damage."""
        known = self.known(run, step)
        if known is None or roots.was_unreadable(known):  # its row was a guess without the manifest
            self._catalog.record_checkpoint(bodies.describe(roots.load_manifest(self._storage.store.files, run, step)))
        with self._catalog.database.write() as session:
            where = (CheckpointRow.run == run, CheckpointRow.step == step)
            sound = update(CheckpointRow).where(*where)
            proven = StorageProbe(self._storage.store.files).proof(run, step)
            session.execute(sound.values(verified=True, damage=None, checked=self._events.now(), proven=proven))


def _is_not_older(placed_checkpoint: lineage.PlacedCheckpoint, copy: lineage.PlacedCheckpoint) -> bool:
    """Whether restoring this copy rather than what was made loses no progress."""
    living = lineage.way([placed_checkpoint, copy])
    return lineage.is_on(living, placed_checkpoint) and (
        placed_checkpoint.step >= copy.step or not lineage.is_on(living, copy)
    )


def listed(database: Database, run: str, step: int) -> list[Replica]:
    wanted = select(ReplicaRow).where(ReplicaRow.run == run, ReplicaRow.step == step).order_by(ReplicaRow.tier)
    with database.read() as session:
        return [Replica.model_validate(row, from_attributes=True) for row in session.scalars(wanted)]


def removed(session: Session, run: str, step: int, requested: bool = False, kept_in: Collection[str] = frozenset()) -> None:
    """A checkpoint is removed or replaced: mark its copies for removal when their replicas are reachable, but those
    `kept_in` tiers, and another root's checkpoints of this step.
    """
    wanted = select(ReplicaRow).where(ReplicaRow.run == run, ReplicaRow.step == step, ReplicaRow.tier.not_in(kept_in))
    for row in session.scalars(wanted):
        if row.state == "copying" and (row.problem or {}).get("code") in _NOT_OURS:
            session.delete(row)
        else:
            row.state, row.requested = "gone", requested


def returned(database: Database, run: str, steps: Sequence[int]) -> None:
    """Checkpoints were brought back: keep those of their copies that were not removed yet."""
    gone = (ReplicaRow.run == run, ReplicaRow.step.in_(steps), ReplicaRow.state == "gone", ReplicaRow.heir.is_(None))
    with database.write() as session:
        session.execute(update(ReplicaRow).where(*gone).values(state="present", requested=False))
        losses.stays(session, run, steps)


def _forget_deleted(session: Session, run: str) -> None:
    """Delete a deleted run's rows with its last copy (`retention/run_removal.py`)."""
    row = session.get(RunRow, run, with_for_update=True)
    if row is None or row.attempt:
        return
    left = (select(table.run).where(table.run == run) for table in (ReplicaRow, CheckpointRow))
    if all(session.scalar(rows.limit(1)) is None for rows in left):
        session.delete(row)


def _holds(records: Records, path: str, data: bytes) -> bool:
    try:
        return read_bounded(records, path, RUN_FILE_BYTES_MAX) == data
    except Damaged:
        return False


def _row(name: str, run: str, step: int) -> Sequence[ColumnElement[bool]]:
    return ReplicaRow.tier == name, ReplicaRow.run == run, ReplicaRow.step == step


def _removable(name: str) -> Select[str, int]:
    """What `removals` lists, without a limit."""
    same = (CheckpointRow.run == ReplicaRow.run, CheckpointRow.step == ReplicaRow.step)
    unproven = select(CheckpointRow.run).where(*same, CheckpointRow.verified.is_(False)).exists()
    return select(ReplicaRow.run, ReplicaRow.step).where(*_gone(name), ~_awaits(name), ~unproven)


def _gone(name: str) -> Sequence[ColumnElement[bool]]:
    return ReplicaRow.tier == name, ReplicaRow.state == "gone"


def _awaits(name: str) -> ColumnElement[bool]:
    """That the checkpoint exists under another name, without a copy in this replica."""
    listed = select(CheckpointRow.run).where(CheckpointRow.run == ReplicaRow.heir, CheckpointRow.step == ReplicaRow.step)
    other = aliased(ReplicaRow)
    copied = select(other.run).where(
        other.tier == name, other.run == ReplicaRow.heir, other.step == ReplicaRow.step, other.state == "present"
    )
    return listed.exists() & ~copied.exists()


def _not_settled(name: str) -> ColumnElement[bool]:
    same = (ReplicaRow.tier == name, ReplicaRow.run == CheckpointRow.run, ReplicaRow.step == CheckpointRow.step)
    gone = select(ReplicaRow.run).where(*same, ReplicaRow.state == "gone").exists()
    return ~gone & ~has_copy(name, _SETTLED)

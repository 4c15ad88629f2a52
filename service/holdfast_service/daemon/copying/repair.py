"""Repairs damaged bytes of a checkpoint from a replica or from the in-memory checkpoint.

Replacement bytes are verified by the manifest with which the checkpoint was committed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

from holdfast_files.opened import CommittedManifest, open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, CorruptManifest, Damaged, NoSuchCheckpoint, StorageFailed
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest import bodies
from holdfast_formats.staging.wire import HeldPart
from holdfast_service.control.checkpoints import shared_files
from holdfast_service.control.checkpoints.replicas import RepairRecords
from holdfast_service.control.control import Control
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying import hard_links
from holdfast_service.daemon.copying.copies import CopyControl, carry
from holdfast_service.daemon.copying.file_repair import FileRepair, mend_file, mend_pair
from holdfast_service.daemon.copying.manifest_repair import same_pairs, stored, trusted_pair
from holdfast_service.daemon.copying.repair_sources import DerivedPieces, Directory, HeldSlotSource, RepairSource, held_slots
from holdfast_service.storage import RootStorage, Store

log = logging.getLogger(__name__)

PRIMARY = "primary"
ALL_FILES = "all files"

Lend = Callable[[str, int], tuple[tuple[HeldPart, ...], tuple[int, ...]]]


class RepairOutcome(NamedTuple):
    """The result of a repair: each repaired file, and the remaining damage, if any."""

    mended: tuple[FileRepair, ...]
    left: CheckpointError | None

    @property
    def source(self) -> str | None:
        """Where the bytes came from; None if damage is left."""
        if self.left is not None:
            return None
        labels = dict.fromkeys(label for mended in self.mended for label in mended.labels)
        return ", ".join(labels) or "itself"


class RepairCandidates(NamedTuple):
    """Other sources of bytes: files that may have the checkpoint, by label, and slots; and the catalog's record."""

    files: Mapping[str, Files]
    held: Callable[[Manifest], AbstractContextManager[HeldSlotSource | None]]
    known: bodies.CheckpointInfo | None


class Repairer:
    """Repairs checkpoints of one root and their replicas, one at a time. Thread-safe.

    `replicas` returns those that can be reached now; `lend` returns the slots of a step's in-memory checkpoint, as
    `MemoryCheckpoints.lend` does.
    """

    def __init__(
        self,
        control: Control,
        replicas: Callable[[], Mapping[str, RootStorage]],
        lend: Lend = lambda run, step: ((), ()),
    ) -> None:
        self._control, self._store, self._records = control, control.store, control.repairs
        self._replicas, self._lend = replicas, lend
        self._lock = threading.Lock()

    def repair(self, run: str, step: int, error: CheckpointError) -> str | None:
        """Repair the checkpoint in which `error` was found, and all other damage in it; returns the bytes' source.

        None if something could not be repaired: the rest is sound then. Otherwise the whole checkpoint was verified
        afterwards, and is recorded as verified. Raises only `NoSuchCheckpoint`.
        """
        return self.run(run, step, error).source

    def restore(self, run: str, step: int) -> dict[str, Any]:
        """Repair what is damaged; the report. Raises remaining damage, and `CheckpointsMissing` if no replica that has the
        missing checkpoint can be read now.
        """
        try:
            outcome = self.run(run, step)
        except NoSuchCheckpoint as error:
            raise self._control.restores.lost.unread(run, step) or error from None
        if outcome.left is not None:
            raise outcome.left
        return {"run": run, "step": step, "repaired": [detail_of(mended) for mended in outcome.mended]}

    def run(self, run: str, step: int, error: CheckpointError | None = None) -> RepairOutcome:
        """As `repair`, with all details; without an error it looks for damage first. A missing checkpoint is copied back
        from a replica, unless it was removed.
        """
        outcome = self._mend(self._store, CheckpointId(run, step), error, None)
        if outcome.left is None:
            self._records.sound(run, step)
        return outcome

    def replica(self, name: str, run: str, step: int, error: CheckpointError | None = None) -> RepairOutcome:
        """Repair a replica from the checkpoint itself, from other replicas, or from the in-memory checkpoint."""
        return self._mend(self._replicas()[name].store, CheckpointId(run, step), error, name)

    def has_copy(self, run: str, step: int) -> bool:
        """Whether a replica has a checkpoint that was not removed, as far as is known or can be seen now."""
        if step in self._control.restores.lost.recorded(run):
            return True
        removed, directory = self._records.removed(run, step), naming.checkpoint_path(run, step)
        return any(name not in removed and one.records.list(directory) for name, one in self._replicas().items())

    def _mend(self, target: Store, which: CheckpointId, error: CheckpointError | None, name: str | None) -> RepairOutcome:
        others: dict[str, Files] = {} if name is None else {PRIMARY: self._control.records}
        others |= {f"replica {other}": one.records for other, one in self._replicas().items() if other != name}
        with self._lock, self._control.readers.reading(*which):
            shared: dict[str, list[int]] = {}
            with suppress(CheckpointError):  # the repair will say it
                shared = shared_files.by_file(target, *which)
            try:
                outcome = mend(target, which, error, RepairCandidates(others, self._held, self._records.known(*which)))
            except NoSuchCheckpoint:
                if name is not None:
                    raise
                return bring_back(target, which, others, self._records)
            for mended in outcome.mended:
                self._share(target, which, mended.file, shared.get(mended.file, []))
        where = {} if name is None else {"replica": name}
        for mended in outcome.mended:
            self._records.repaired(*which, {**detail_of(mended), **where})
        if outcome.left is not None:
            log.error("%s@%s %s could not be repaired: %s", *which, where or "", outcome.left.detail)
        return outcome

    def _share(self, target: Store, which: CheckpointId, file: str, steps: Sequence[int]) -> None:
        """Put a repaired file in the place of the damaged one in the checkpoints that had it, too."""
        for step in steps:
            try:
                with self._control.readers.reading(which.run, step):
                    hard_links.share(target, which, file, step)
            except CheckpointError as error:  # it is damaged still, as its own check says
                log.warning("%s@%s keeps the damaged %s: %s", which.run, step, file, error.detail)

    def _held(self, manifest: Manifest) -> AbstractContextManager[HeldSlotSource | None]:
        return held_slots(*self._lend(manifest.run, manifest.step), manifest, self._control)


def mend(store: Store, which: CheckpointId, error: CheckpointError | None, elsewhere: RepairCandidates) -> RepairOutcome:
    """Repair a checkpoint of `store`, file by file: first COMMIT and manifest, then the file of `error`, then the rest.

    Raises `NoSuchCheckpoint` for one that is not there at all; any other failure is in the outcome.
    """
    directory = naming.checkpoint_path(*which)
    try:
        there = store.files.list(directory)
    except Damaged as unreadable:  # the commit object in a bucket
        return RepairOutcome((), unreadable)
    if not there and not store.stamps(*which):  # in a bucket, the commit object may stand without what it names
        raise NoSuchCheckpoint(
            f"{which[0]} has no checkpoint of step {which[1]}", hint=f"`holdfast ls {which[0]}` lists its checkpoints"
        )
    mended: list[FileRepair] = []
    try:
        pair, label = trusted_pair(store.files, which, elsewhere.files, elsewhere.known)
        if label is not None:
            both = ((naming.MANIFEST, pair.encoded), (naming.COMMIT, pair.commit))
            wrong = [name for name, data in both if stored(store.files, f"{directory}/{name}") != data]
            mend_pair(store, pair)
            mended += [FileRepair(name, (), (label,)) for name in wrong]
        with elsewhere.held(pair.manifest) as slots:
            sources: list[RepairSource] = [DerivedPieces(pair.manifest)]
            sources += [Directory(name, elsewhere.files[name], directory) for name in same_pairs(elsewhere.files, pair)]
            sources += [] if slots is None else [slots]
            _mend_files(store, pair, error, sources, mended)
    except CheckpointError as left:
        return RepairOutcome(tuple(mended), left)
    return RepairOutcome(tuple(mended), None)


def bring_back(store: Store, which: CheckpointId, others: Mapping[str, Files], records: RepairRecords) -> RepairOutcome:
    """Copy a checkpoint that is missing in `store` back from the first of the `others` that has it complete (I3).

    Raises `NoSuchCheckpoint` if none has it, or if it was removed; any other failure is in the outcome.
    """
    directory, removed = naming.checkpoint_path(*which), records.removed(*which)
    left: CheckpointError = NoSuchCheckpoint(
        f"{which[0]} has no checkpoint of step {which[1]}", hint=f"`holdfast ls {which[0]}` lists its checkpoints"
    )
    for label, source in others.items():
        if label.removeprefix("replica ") in removed or not source.list(directory):
            continue
        place = naming.job_place(*which)
        try:
            pair = open_checkpoint(source, directory)
            found = CheckpointId(pair.manifest.run, pair.manifest.step)
            if found != which:
                raise CorruptManifest(f"{label} has {found.run}@{found.step} in {directory}", file=naming.MANIFEST)
            records.admit(pair.manifest)
            carry(source, directory, store.begin(place), pair.manifest, CopyControl())
            records.bring(source, label, place, pair.encoded, pair.commit)
        except CheckpointError as error:
            log.error("cannot copy %s@%s back from %s: %s", *which, label, error.detail)
            left = error
            with suppress(CheckpointError):
                store.discard(place)
            continue
        log.warning("%s@%s was missing and was copied back from %s", *which, label)
        return RepairOutcome((FileRepair(ALL_FILES, (), (label,)),), None)
    if isinstance(left, NoSuchCheckpoint):
        raise left
    return RepairOutcome((), left)


def _mend_files(
    store: Store,
    pair: CommittedManifest,
    error: CheckpointError | None,
    sources: list[RepairSource],
    mended: list[FileRepair],
) -> None:
    """Repair the named file, then all that verification finds, until nothing is found; each file is tried once."""
    manifest = pair.manifest
    tried: set[str] = set()
    damage_left = error
    while True:
        file = None if damage_left is None else _named_in(damage_left, manifest)
        if file is None or file in tried:
            try:
                verify(store.files, naming.checkpoint_path(manifest.run, manifest.step))
                return
            except (Damaged, StorageFailed) as damage:
                damage_left, file = damage, _named_in(damage, manifest)
                if file is None or file in tried:
                    raise
        tried.add(file)
        mended.append(mend_file(store, pair, file, sources))
        damage_left = None


def _named_in(error: CheckpointError, manifest: Manifest) -> str | None:
    """The damaged file of the checkpoint; a disk's read error has its path."""
    file = error.members.get("file") or str(error.members.get("path", "")).rpartition("/")[2]
    return file if manifest.file(file) is not None else None


def detail_of(mended: FileRepair) -> dict[str, Any]:
    """A repaired file in an event: file, source, and tensor and range of the first damage."""
    detail: dict[str, Any] = {"file": mended.file, "source": ", ".join(mended.labels) or "itself"}
    if mended.pieces:
        first = mended.pieces[0]
        detail |= {"tensor": first.tensor, "offset": first.start, "length": first.length, "ranges": len(mended.pieces)}
    return detail

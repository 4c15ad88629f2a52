"""Repairs damaged bytes of a checkpoint from a replica or from the in-memory checkpoint.

Replacement bytes are verified by the manifest with which the checkpoint was committed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.digest import digest
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, CorruptManifest, Damaged, NoSuchCheckpoint, StorageFailed
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest import bodies
from holdfast_formats.staging.wire import HeldPart
from holdfast_service.control.checkpoints.replicas import RepairRecords
from holdfast_service.control.control import Control
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.daemon.copying.copies import CopyControl, carry
from holdfast_service.daemon.copying.file_repair import FileRepair, mend_file, mend_small
from holdfast_service.daemon.copying.manifest_repair import same_pairs, stored, trusted_pair
from holdfast_service.daemon.copying.repair_sources import DerivedPieces, Directory, HeldSlotSource, RepairSource, held_slots
from holdfast_service.storage import Tier

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
    """Other sources of bytes: tiers that may have the checkpoint, by label, and slots; and the catalog's record."""

    tiers: Mapping[str, Tier]
    held: Callable[[Manifest], AbstractContextManager[HeldSlotSource | None]]
    known: bodies.CheckpointInfo | None


class Repairer:
    """Repairs checkpoints of one root and their replicas, one at a time. Thread-safe.

    `replicas` returns the current other tiers; `lend` returns the slots of a step's in-memory checkpoint, as
    `MemoryCheckpoints.lend` does.
    """

    def __init__(
        self,
        tier: Tier,
        control: Control,
        records: RepairRecords,
        replicas: Callable[[], Mapping[str, Tier]],
        lend: Lend = lambda run, step: ((), ()),
    ) -> None:
        self._tier, self._replicas, self._lend = tier, replicas, lend
        self._control, self._records = control, records
        self._lock = threading.Lock()

    def repair(self, run: str, step: int, error: CheckpointError) -> str | None:
        """Repair the checkpoint in which `error` was found, and all other damage in it; returns the bytes' source.

        None if something could not be repaired: the rest is sound then. Otherwise the whole checkpoint was verified
        afterwards, and is recorded as verified. Raises only `NoSuchCheckpoint`.
        """
        return self.run(run, step, error).source

    def restore(self, run: str, step: int) -> dict[str, Any]:
        """Repair what is damaged; the report. Raises remaining damage."""
        outcome = self.run(run, step)
        if outcome.left is not None:
            raise outcome.left
        return {"run": run, "step": step, "repaired": [detail_of(mended) for mended in outcome.mended]}

    def run(self, run: str, step: int, error: CheckpointError | None = None) -> RepairOutcome:
        """As `repair`, with all details; without an error it looks for damage first. A missing checkpoint is copied back
        from a replica, unless it was removed.
        """
        outcome = self._mend(self._tier, CheckpointId(run, step), error, None)
        if outcome.left is None:
            self._records.sound(run, step)
        return outcome

    def replica(self, name: str, run: str, step: int, error: CheckpointError | None = None) -> RepairOutcome:
        """Repair a replica from the checkpoint itself, from other replicas, or from the in-memory checkpoint."""
        return self._mend(self._replicas()[name], CheckpointId(run, step), error, name)

    def has_copy(self, run: str, step: int) -> bool:
        """Whether a replica has a checkpoint that was not removed."""
        removed, directory = self._records.removed(run, step), naming.checkpoint_path(run, step)
        return any(name not in removed and tier.list(directory) for name, tier in self._replicas().items())

    def _mend(self, target: Tier, which: CheckpointId, error: CheckpointError | None, name: str | None) -> RepairOutcome:
        tiers = {f"replica {other}": tier for other, tier in self._replicas().items() if other != name}
        if name is not None:
            tiers = {PRIMARY: self._tier, **tiers}
        with self._lock, self._control.readers.reading(*which):
            if name is None and not target.list(naming.checkpoint_path(*which)):
                return bring_back(target, which, tiers, self._records)
            outcome = mend(target, which, error, RepairCandidates(tiers, self._held, self._records.known(*which)))
        where = {} if name is None else {"replica": name}
        for mended in outcome.mended:
            self._records.repaired(*which, {**detail_of(mended), **where})
        if outcome.left is not None:
            log.error("%s@%s %s could not be repaired: %s", *which, where or "", outcome.left.detail)
        return outcome

    def _held(self, manifest: Manifest) -> AbstractContextManager[HeldSlotSource | None]:
        return held_slots(*self._lend(manifest.run, manifest.step), manifest, self._control)


def mend(tier: Tier, which: CheckpointId, error: CheckpointError | None, elsewhere: RepairCandidates) -> RepairOutcome:
    """Repair a checkpoint in `tier`, file by file: first COMMIT and manifest, then the file of `error`, then the rest.

    Raises `NoSuchCheckpoint` for one that is not there at all; any other failure is in the outcome.
    """
    directory = naming.checkpoint_path(*which)
    if not tier.list(directory):
        raise NoSuchCheckpoint(
            f"{which[0]} has no checkpoint of step {which[1]}", hint=f"`holdfast ls {which[0]}` lists its checkpoints"
        )
    mended: list[FileRepair] = []
    try:
        pair, label = trusted_pair(tier, which, elsewhere.tiers, elsewhere.known)
        for name, data in ((naming.MANIFEST, pair.encoded), (naming.COMMIT, pair.commit)):
            if label is not None and stored(tier, f"{directory}/{name}") != data:
                mended.append(mend_small(tier, pair.manifest, name, data, label))
        with elsewhere.held(pair.manifest) as slots:
            sources: list[RepairSource] = [DerivedPieces(pair.manifest)]
            sources += [Directory(name, elsewhere.tiers[name], directory) for name in same_pairs(elsewhere.tiers, pair)]
            sources += [] if slots is None else [slots]
            _mend_files(tier, pair.manifest, error, sources, mended)
    except CheckpointError as left:
        return RepairOutcome(tuple(mended), left)
    return RepairOutcome(tuple(mended), None)


def bring_back(tier: Tier, which: CheckpointId, tiers: Mapping[str, Tier], records: RepairRecords) -> RepairOutcome:
    """Copy a checkpoint that is missing in `tier` back from the first of the `tiers` that has it complete (I3).

    Raises `NoSuchCheckpoint` if none has it, or if it was removed; any other failure is in the outcome.
    """
    directory, removed = naming.checkpoint_path(*which), records.removed(*which)
    left: CheckpointError = NoSuchCheckpoint(
        f"{which[0]} has no checkpoint of step {which[1]}", hint=f"`holdfast ls {which[0]}` lists its checkpoints"
    )
    for label, source in tiers.items():
        if label.removeprefix("replica ") in removed or not source.list(directory):
            continue
        place = naming.job_place(*which, digest(f"bring back {label}".encode()))
        try:
            pair = open_checkpoint(source, directory)
            found = CheckpointId(pair.manifest.run, pair.manifest.step)
            if found != which:
                raise CorruptManifest(f"{label} has {found.run}@{found.step} in {directory}", file=naming.MANIFEST)
            records.admit(pair.manifest)
            tier.remove_tree(place.path)
            carry(source, directory, tier, place.path, pair.manifest, CopyControl())
            records.bring(source, label, place, pair.encoded, pair.commit)
        except CheckpointError as error:
            log.error("cannot copy %s@%s back from %s: %s", *which, label, error.detail)
            left = error
            with suppress(CheckpointError):
                tier.remove_tree(place.path)
            continue
        log.warning("%s@%s was missing and was copied back from %s", *which, label)
        return RepairOutcome((FileRepair(ALL_FILES, (), (label,)),), None)
    if isinstance(left, NoSuchCheckpoint):
        raise left
    return RepairOutcome((), left)


def _mend_files(
    tier: Tier, manifest: Manifest, error: CheckpointError | None, sources: list[RepairSource], mended: list[FileRepair]
) -> None:
    """Repair the named file, then all that verification finds, until nothing is found; each file is tried once."""
    tried: set[str] = set()
    damage_left = error
    while True:
        file = None if damage_left is None else _named_in(damage_left, manifest)
        if file is None or file in tried:
            try:
                verify(tier, naming.checkpoint_path(manifest.run, manifest.step))
                return
            except (Damaged, StorageFailed) as damage:
                damage_left, file = damage, _named_in(damage, manifest)
                if file is None or file in tried:
                    raise
        tried.add(file)
        mended.append(mend_file(tier, manifest, file, sources))
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

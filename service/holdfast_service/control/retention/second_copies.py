"""Decides which checkpoint gets files of its own where the two newest ones share theirs, and puts the copies in place.

One damaged byte must not be in all checkpoints of a run. Saves take an unchanged file from a checkpoint that has other bytes
on the disk than the newest one; so after one copy, no two neighbours share a file again. A copy is renamed over it (I4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from holdfast_files.opened import CommittedManifest
from holdfast_formats import naming
from holdfast_formats.errors import CheckpointError, InUse
from holdfast_formats.naming import CheckpointId, Place
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints import shared_files
from holdfast_service.control.retention.admission import Admission
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.storage import Store


class DueCopies(NamedTuple):
    """Files of a checkpoint that are one with those of the checkpoint before it."""

    step: int
    files: Sequence[str]


class SecondCopies:
    """The decisions about second copies in one root. Thread-safe."""

    def __init__(self, store: Store, catalog: Catalog, rotation: Rotation, admission: Admission, events: Events) -> None:
        self._store, self._catalog, self._rotation = store, catalog, rotation
        self._admission, self._events = admission, events

    def due(self, run: str) -> DueCopies | None:
        """What is to be copied of the run's newest checkpoint. Not before both are verified, and not if the older one goes
        now, or may once it is not read any more.
        """
        shared_files.look(self._store, self._catalog.database, run)  # also what an interrupted copy has left to record
        proofs = self._catalog.proofs(run)
        steps = sorted(proofs)[-2:]
        if len(steps) < 2 or any(proofs[step].proven is None for step in steps):
            return None
        older, newest = (self._store.identities(naming.checkpoint_path(run, step)) for step in steps)
        known = {file.id for file in older.values()}
        files = [name for name, file in newest.items() if file.id in known]
        if not files:
            return None
        if steps[0] in self._rotation.readers.held(run):
            return None
        stays = all(verdict.keep for verdict in self._rotation.verdicts.preview(run, step=steps[0]).verdicts)
        return DueCopies(steps[1], sorted(files)) if stays else None

    def refuse(self, which: CheckpointId, size: int) -> None:
        """`QuotaExceeded` or `NoSpace` if a copy of so many bytes does not fit; nothing is removed for it."""
        self._admission.refuse_copy(which.run, which.step, size)

    def put(self, place: Place, pair: CommittedManifest, file: str) -> None:
        """Put the copy of a file that is staged and proven at `place` into its checkpoint. `InUse` if there is another one
        now, or none.
        """
        run, step = place.run, place.step
        with self._rotation.deciding(run):
            commit = f"{naming.checkpoint_path(run, step)}/{naming.COMMIT}"
            if self._store.files.size(commit) is None or self._store.files.read(commit) != pair.commit:
                raise InUse(f"{run}@{step} was removed or saved again in the meantime", hint="nothing was changed")
            self._rotation.still_deciding()
            self._store.mend(place, pair.encoded, pair.commit)
            if proof := self._rotation.probe.proof(run, step):
                self._catalog.prove(run, step, proof)
        shared_files.look(self._store, self._catalog.database, run)
        text = f"step {step} has a copy of {file} of its own, which it shared with the step before"
        self._events.add("second-copy-made", text, run, step, file=file)

    def failed(self, which: CheckpointId, error: CheckpointError) -> None:
        """A copy could not be made, and why."""
        text = f"steps before {which.step} share bytes with it that could not be copied: {error.detail}"
        self._events.add("second-copy-failed", text, *which, "warning", problem=error.problem())

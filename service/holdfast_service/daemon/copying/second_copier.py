"""The worker that makes second copies of files that neighbouring checkpoints share: verified, staged, and verified again.

It runs at idle priority and gives way to saves, but not at a scrub's rate: until the copy is there, one damaged byte is in
all checkpoints of the run. A crash leaves the shared file or the copy.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from holdfast_files.opened import open_checkpoint
from holdfast_formats import naming
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, Conflict, Damaged, NotFound
from holdfast_formats.naming import CheckpointId
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.retention.second_copies import SecondCopies
from holdfast_service.daemon.copying.copies import CopyControl, CopyStopped, carry, only
from holdfast_service.daemon.copying.run_worker import RunWorker
from holdfast_service.daemon.writing.writer import under_way
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

AGAIN_S = 60.0  # after a save, a reader or a catalog that was away came in between
FAILED_AGAIN_S = 3600.0  # where there is no room, or the storage failed
WAIT_S = 0.05  # between two looks whether a save is still being written


class SecondCopier:
    """Copies what is due of the runs passed to its `worker`."""

    def __init__(
        self,
        store: Store,
        records: SecondCopies,
        readers: Readers,
        *,
        suspect: Callable[[str, int, Damaged], None] = lambda run, step, error: None,
    ) -> None:
        """`suspect` is called with a damaged checkpoint, which was not copied."""
        self._store, self._records, self._readers = store, records, readers
        self._suspect = suspect
        self._id = uuid.uuid4().bytes  # another node may copy the same file, and must not write where this one does
        self._told: set[CheckpointId] = set()  # whose failure was recorded
        self.worker = RunWorker("holdfast-copier", self._look)

    def run_once(self, run: str) -> list[str]:
        """Copy all files of a run that are due now; their names. A failure is told once, and tried again later."""
        due = self._records.due(run)
        if due is None:
            return []
        which, done = CheckpointId(run, due.step), list[str]()
        try:
            for file in due.files:
                self._copy(which, file)
                done.append(file)
        except (CatalogUnavailable, Conflict, NotFound) as error:  # a save, a mark or a removal came first
            log.info("%s@%s gets no files of its own for now: %s", *which, error.detail)
            self.worker.again(run, AGAIN_S)
        except Damaged as error:
            log.error("%s@%s is damaged and was not copied: %s", *which, error.detail)
            self._suspect(*which, error)
        except CheckpointError as error:
            log.warning("%s@%s gets no files of its own for now: %s (%s)", *which, error.detail, error.hint)
            if which not in self._told:
                self._told.add(which)
                self._records.failed(which, error)
            self.worker.again(run, FAILED_AGAIN_S)
        return done

    def _copy(self, which: CheckpointId, file: str) -> None:
        directory = naming.checkpoint_path(*which)
        with self._readers.checking(*which):
            pair = open_checkpoint(self._store.files, directory)
            alone = only(pair.manifest, {file})
            self._records.refuse(which, sum(entry.bytes for entry in alone.files))
            place = naming.job_place(*which, digest=hashlib.sha256(self._id + pair.commit).hexdigest())
            staged = self._store.begin(place)
            try:
                staged.clear()  # of what an earlier try could not remove
                going = CopyControl(None, lambda: self._is_to_stop(which))
                carry(self._store.files, directory, staged, alone, going)
                self._records.put(place, pair, file)
            finally:
                with suppress(CheckpointError):  # the next start sweeps what stays
                    self._store.discard(place)
        log.info("%s@%s has a copy of %s of its own", *which, file)

    def _is_to_stop(self, which: CheckpointId) -> bool:
        """Whether a save waits to take the checkpoint's place, or the daemon ends. Waits while a save is being written."""
        while not (stops := self.worker.is_closed or self._readers.is_awaited(*which)) and under_way():
            time.sleep(WAIT_S)
        return stops

    def _look(self, run: str) -> None:
        try:
            self.run_once(run)
        except CopyStopped:
            self.worker.again(run, AGAIN_S)
        except CheckpointError as error:
            log.warning("cannot look for second copies of %s: %s", run, error.detail)
            self.worker.again(run, AGAIN_S)
        except Exception:
            log.exception("the second copies of %s failed", run)

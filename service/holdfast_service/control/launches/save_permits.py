"""Which saves may begin: of the newest attempt, and of a step that no other line of training has committed."""

from __future__ import annotations

import logging

from holdfast_formats import naming
from holdfast_formats.errors import AlreadyCommitted, CatalogUnavailable, CheckpointError
from holdfast_formats.lineage import Intent
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.catalog.round_records import RoundRecords
from holdfast_service.control.launches.lineage_index import LineageIndex

log = logging.getLogger(__name__)

LOOK_S = 2.0  # how long to wait for the catalog's sealed rounds


class SavePermits:
    """Refuses saves before they are staged. Thread-safe."""

    def __init__(
        self, attempts: Attempts, lineage_index: LineageIndex, rounds: RoundRecords, record_queue: RecordQueue
    ) -> None:
        self._attempts, self._lineage_index, self._rounds, self._record_queue = attempts, lineage_index, rounds, record_queue

    def check_new(self, run: str, step: int, attempt: int, intent: Intent) -> None:
        """`StaleAttempt` (I6) or `AlreadyCommitted` for a save that may not begin."""
        naming.check_run(run)
        naming.check_step(step)
        self._attempts.refuse_older(run, attempt)
        self._refuse_committed(run, step, attempt, intent)

    def check_resumed(self, run: str, step: int, attempt: int, intent: Intent | None) -> None:
        """As `check_new` for a save that an earlier daemon began, as far as its intent is known.

        A save that all ranks had sealed continues although a newer attempt waits for its end (I6).
        """
        naming.check_step(step)
        self._attempts.saw(run, attempt)
        if attempt == self._attempts.newest(run) or not self._was_complete(run, step, attempt):
            self._attempts.refuse_older(run, attempt)
        if intent is not None:
            self._refuse_committed(run, step, attempt, intent)

    def _refuse_committed(self, run: str, step: int, attempt: int, intent: Intent) -> None:
        """`AlreadyCommitted` where the step may not be saved, as of now; publishing checks again."""
        try:
            self._lineage_index.place(run, step, attempt, intent)
        except AlreadyCommitted:
            raise
        except CheckpointError as error:  # training does not wait for storage, nor fail by it
            log.warning("cannot determine yet whether %s@%s may be saved: %s", run, step, error.detail)

    def _was_complete(self, run: str, step: int, attempt: int) -> bool:
        if self._attempts.owes(run, step, attempt):
            return True
        try:
            return self._record_queue.query(lambda: self._rounds.is_sealed(run, step, attempt), LOOK_S)
        except CatalogUnavailable as away:
            log.info("cannot determine whether %s@%s was complete: %s", run, step, away.detail)
            return False

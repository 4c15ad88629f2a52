"""Saves that all ranks had staged when the last daemon ended: committed since, in progress, or lost, which is recorded."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast_formats import naming
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.catalog.round_records import RoundRecords
from holdfast_service.control.catalog.rounds import Rounds
from holdfast_service.control.checkpoints import roots
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

NOT_KEPT = "the daemon stopped before writing it, and its memory was gone when the next daemon started"


class _Step(NamedTuple):
    run: str
    step: int


class RecoveredSaves:
    """Nothing here waits for the catalog. `settle` is called once ranks have had time to reconnect with their memory."""

    def __init__(
        self, store: Store, records: RoundRecords, record_queue: RecordQueue, rounds: Rounds, events: Events
    ) -> None:
        self._store, self._records, self._record_queue, self._rounds, self._events = (
            store,
            records,
            record_queue,
            rounds,
            events,
        )
        self._reasons: dict[_Step, str] = {}  # why memory was let go of while no daemon was there
        self._settled = False

    def let_go(self, record: Mapping[str, Any]) -> None:
        """A holder has recorded that it dropped staged saves, and why."""
        for save in record.get("saves", ()):
            run, step = save.get("run"), save.get("step")
            if isinstance(run, str) and naming.is_run_name(run) and isinstance(step, int):
                self._reasons[_Step(run, step)] = f"the process that held its memory released it: {record.get('why')}"

    def settle(self) -> None:
        """End saves that were staged and are now neither committed nor in progress as lost. Later calls do nothing."""
        if self._settled:
            return
        self._settled = True
        self._record_queue.enqueue("which staged saves are lost", self._say_lost)

    def _say_lost(self) -> None:
        lost = {}
        for save in self._records.staged():
            if self._rounds.knows(save.run, save.step, save.attempt):
                continue  # its ranks, or what kept its memory, have brought it
            key = _Step(save.run, save.step)
            why = f"all ranks had staged this save, but it is lost: {self._reasons.get(key, NOT_KEPT)}"
            if self._records.end(save.id, "aborted", utc_now(), "round-aborted", why) is not None:
                lost[key] = why
        for key, reason in self._reasons.items():  # the catalog may never have heard of it
            if key not in lost and key.step not in roots.committed(self._store, key.run):
                lost[key] = f"all ranks here had staged this save, but it is lost: {reason}"
        for key, why in lost.items():
            log.error("%s@%d: %s", key.run, key.step, why)
            self._events.record("staged-save-lost", f"step {key.step} was not saved: {why}", key.run, key.step, "error")
        self._reasons.clear()

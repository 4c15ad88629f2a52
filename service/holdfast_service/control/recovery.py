"""Makes root and catalog agree, at the daemon's start and whenever the catalog answers again; sweeps what crashes left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

from holdfast_formats.errors import CatalogUnavailable, CheckpointError
from holdfast_formats.naming import Place
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.catalog import recovery
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.jobs.staged import wanted_places
from holdfast_service.control.parts import CheckpointParts
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

ASK_S = 10.0


def sweep(
    store: Store,
    spared: Collection[Place] = (),
    idle_s: float | None = None,
    deciding: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Restore interrupted replacements, each under a lock of its run, and remove what was never committed, except `spared`
    places; with `idle_s` only what was not written to for so long.
    """
    for path in store.put_back(deciding):
        log.warning("put back %s, which was being replaced", path)
    for path in store.sweep(spared, idle_s):
        log.info("swept %s", path)


class Recovery:
    """Repairs an earlier daemon's leftovers in one root, and updates its catalog from the directories."""

    def __init__(self, parts: CheckpointParts, claim: Callable[[], None]) -> None:
        """`claim` raises where the catalog is another root's."""
        self._store, self._catalog, self._nodes = parts.store, parts.catalog, parts.nodes
        self._record_queue, self._attempts, self._rounds, self._events = (
            parts.record_queue,
            parts.attempts,
            parts.rounds,
            parts.events,
        )
        self._rotation, self._renaming, self._trash = parts.rotation, parts.renaming, parts.trash
        self._absences, self._claim = parts.absences, claim
        self._started = False  # what an earlier daemon left in the catalog was put right
        parts.returned.subscribe(self._returned)

    def recover(self, adopt: Callable[[], Collection[int]] = tuple) -> None:
        """At start: remove leftovers that were never committed, update the catalog from the directories, end old saves.

        Between the two, `adopt` takes over what an earlier daemon left in memory. Without a catalog only its part waits.
        """
        if self._nodes.alone:  # else others may be writing there: the one on duty sweeps what is old
            sweep(self._store, wanted_places(self._catalog.database, self._store.files))
        self._started = False
        self._record_queue.unknown()
        while not self._record_queue.flush() and self._record_queue.trouble is None:
            pass
        adopt()
        why = "the daemon stopped before this save was complete"
        self._record_queue.enqueue(
            "which saves ended with the last daemon",
            lambda: self._catalog.rounds.abort_open(utc_now(), "round-aborted", why, keep=self._rounds.ids()),
        )

    def reconcile(self) -> list[roots.Unreadable]:
        """List the checkpoints of the directories, once what was deleted is forgotten: it is no loss. Returns the unreadable
        ones.
        """
        self._finish(self._trash.recover)
        return roots.reconcile(self._store, self._catalog, absences=self._absences)

    def _returned(self) -> None:
        """The catalog answers for the first time or again: it may be an older one, another one, or an empty one."""
        self._follow()
        self._finish(self._renaming.recover)
        for run in roots.runs(self._store.files):
            if self._store.replaced(run):  # an earlier daemon has not come to let go of it
                self._rotation.due(run)

    def _finish(self, interrupted: Callable[[], None]) -> None:
        try:
            interrupted()
        except CatalogUnavailable:
            raise
        except CheckpointError as error:  # the next start tries again
            log.error("cannot finish interrupted deletions and renames of runs: %s", error.detail)

    def _follow(self) -> None:
        database, rebuilt = self._catalog.database, None
        if database.unsound:
            rebuilt = recovery.mend(database)
        self._claim()
        if rebuilt is not None:
            self._events.record("catalog-rebuilt", rebuilt, level="warning")
        if not self._started:
            self._events.skip_lost_ids()
        self._rounds.look_again()
        for run, step, problem in self.reconcile():
            log.error("cannot read %s@%s: %s", run, step, problem.detail)
        self._attempts.merge(self._catalog.declared())
        self._catalog.note_attempts(self._attempts.known())
        if self._started:
            return
        for found in self._catalog.rounds.settle_committed(utc_now()):
            text = f"step {found.step} is committed; the daemon stopped before it could report it"
            self._events.record("checkpoint-committed", text, found.run, found.step)
        self._started = True

    def learn_attempts(self) -> None:
        """Take the declared attempts from the catalog, in a root that has no file of them yet, or has lost it."""
        if self._attempts.complete:
            return
        try:
            self._attempts.merge(self._record_queue.query(self._catalog.declared, ASK_S))
        except CatalogUnavailable:
            if roots.runs(self._store.files):
                raise
            self._attempts.merge({})  # nothing was ever saved here

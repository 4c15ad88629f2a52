"""The catalog follows the directories: what it is told when it is there, for the first time or again."""

from __future__ import annotations

import logging
from collections.abc import Callable

from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.moments import utc_now
from holdfast_service.control.catalog import salvage
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.book import Book
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.rounds import Rounds
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.roots import Absences
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

ASK_S = 10.0


class FollowingCatalog:
    """Tells the catalog of one root what stands there, whenever the book finds that it answers."""

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        attempts: Attempts,
        rounds: Rounds,
        events: Events,
        absences: Absences,
    ) -> None:
        self._store, self._catalog, self._attempts = store, catalog, attempts
        self._rounds, self._events, self._absences = rounds, events, absences
        self._started = False  # what an earlier daemon left in the catalog was put right

    def start(self) -> None:
        """The daemon starts: what an earlier one left is put right when the catalog is there."""
        self._started = False

    def reconcile(self) -> list[roots.Unreadable]:
        """List what stands in the directories; returns what cannot be read."""
        return roots.reconcile(self._store, self._catalog, absences=self._absences)

    def returned(self, claim: Callable[[], None]) -> None:
        """The catalog is there, for the first time or again: it may be an older one, another one, or one without rows.

        `claim` raises where it is another root's.
        """
        database, rebuilt = self._catalog.database, None
        if database.unsound:
            rebuilt = salvage.mend(database)
        claim()
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
        for found in self._catalog.settle_committed_rounds(utc_now()):
            text = f"step {found.step} is committed; the daemon ended before it could report it"
            self._events.record("checkpoint-committed", text, found.run, found.step)
        self._started = True

    def learn_attempts(self, book: Book) -> None:
        """In a root that has no file of them yet, or has lost it, the catalog knows which attempts were declared."""
        if self._attempts.complete:
            return
        try:
            self._attempts.merge(book.ask(self._catalog.declared, ASK_S))
        except CatalogUnavailable:
            if roots.runs(self._store.files):
                raise
            self._attempts.merge({})  # nothing was ever saved here

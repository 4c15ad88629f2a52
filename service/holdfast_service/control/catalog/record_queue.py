"""Queue of records for the catalog. One thread writes them in order, and retries while the catalog does not answer.

So training never waits for SQL. Queries wait here for a moment first, so that they see earlier records. What is
left when the daemon ends is history; checkpoints are in the directories.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import NamedTuple, TypeVar

from sqlalchemy import select

from holdfast_formats.errors import CatalogUnavailable, CheckpointError, NoSpace
from holdfast_formats.rest.access import ALL
from holdfast_service.control.database.database import Database, Trouble
from holdfast_service.control.database.visible import limited_to

log = logging.getLogger(__name__)

RETRY_S = 0.5
LINGER_S = 0.02  # after the first of several records, unless a caller waits for it
RENEW_S = 1.0  # after the last record, until figures of runs are renewed
LOOK_S = 5.0  # interval of probes of the catalog when nothing waits
SETTLE_S = 5.0  # how long a query waits for earlier records
STUCK_S = 3.0  # in one transaction; then queries no longer wait for earlier records
AWAY_S = 3.0  # in one transaction: the catalog counts as away
CLOSE_S = 5.0
WAITING_MAX = 200_000

_Found = TypeVar("_Found")


class _Record(NamedTuple):
    what: str
    act: Callable[[], object]


class RecordQueue:
    """The queue of one catalog. Thread-safe. `returned` is called, in the queue's thread, before anything is written to a
    catalog that did not answer before: it may be another one. When no records wait, `renew` updates what the catalog keeps
    of other rows, and returns whether it has more to do.
    """

    def __init__(
        self, database: Database, returned: Callable[[], None] = lambda: None, renew: Callable[[], bool] | None = None
    ) -> None:
        self.database, self.returned = database, returned
        self._renew, self._pause_s = renew or self._look, LOOK_S
        self._changed = threading.Condition()
        self._waiting: deque[_Record] = deque()
        self._known = True  # that the catalog is the one it was
        self._missed = False  # storage has changed and the catalog may not show it
        self._closed = False
        self._awaited = 0  # callers that wait until the queue is empty
        self._lost = 0
        self._thread: threading.Thread | None = None
        database.entering.subscribe(self.flush)
        database.missed.subscribe(self._miss)

    @property
    def pending(self) -> int:
        """How many records wait."""
        return len(self._waiting)

    @property
    def trouble(self) -> Trouble | None:
        """Why the catalog does not answer, None while it does."""
        known, since = self.database.trouble, self.database.keeper_since
        if known is None and since is not None and (stuck := time.monotonic() - since) > AWAY_S:
            return Trouble(time.time() - stuck, "the catalog: no response yet", reads=True)
        return known

    @property
    def state(self) -> str | None:
        """A message about the catalog's state; None while it answers."""
        trouble = self.trouble
        if trouble is None:
            return None
        away_s = max(time.time() - trouble.since, 0.0)
        return f"{trouble.why}; not available for {away_s:.0f} s; saves continue, {self.pending} records are waiting"

    def enqueue(self, what: str, act: Callable[[], object]) -> None:
        """Run `act`, which records something in the catalog, later. `what` appears in the log if it fails."""
        with self._changed:
            if len(self._waiting) >= WAITING_MAX:
                self._lost += 1
                return
            self._waiting.append(_Record(what, act))
            self._begin()
            self._changed.notify_all()

    def unknown(self) -> None:
        """The catalog may have changed: compare it with storage before the next record is written."""
        with self._changed:
            self._known = False
            self._begin()
            self._changed.notify_all()

    def _miss(self) -> None:
        """A record about storage was lost: write all that storage shows before the next record."""
        with self._changed:
            self._missed = True
            self._begin()
            self._changed.notify_all()

    def flush(self, wait_s: float = SETTLE_S) -> bool:
        """Wait until the catalog has all records; False if it does not answer or takes longer."""
        if threading.current_thread() is self._thread:
            return True
        limit = time.monotonic() + wait_s
        with self._hurried():
            while self._waiting or self._missed or not self._known:
                since = self.database.keeper_since
                stuck = since is not None and time.monotonic() - since > STUCK_S
                if self._closed or self.database.trouble is not None or stuck or time.monotonic() > limit:
                    return False
                self._changed.wait(0.05)
        return True

    def recorded(self, wait_s: float) -> bool:
        """Wait until the catalog has all records, even if it does not answer for a while; False on timeout."""
        with self._hurried():
            self._changed.wait_for(lambda: self._closed or self._is_told(), wait_s)
            return not self._closed and self._is_told()

    def _is_told(self) -> bool:
        return self._known and not (self._waiting or self._missed) and self.database.trouble is None

    def query(self, question: Callable[[], _Found], wait_s: float) -> _Found:
        """Query the catalog as the daemon, which sees all runs: a decision for a run must not depend on its caller.

        Raises `CatalogUnavailable` if it does not answer within `wait_s`.
        """
        trouble = self.trouble
        if trouble is not None:
            raise CatalogUnavailable(trouble.why)
        answers: list[_Found] = []
        failed: list[CheckpointError] = []

        def act() -> None:
            try:
                with limited_to(ALL):
                    answers.append(question())
            except CheckpointError as error:
                failed.append(error)

        asking = threading.Thread(target=copy_context().run, args=(act,), name="holdfast-asking", daemon=True)
        asking.start()
        asking.join(wait_s)
        if failed:
            raise failed[0]
        if not answers:
            raise CatalogUnavailable(f"the catalog did not answer within {wait_s:g} s")
        return answers[0]

    def close(self) -> None:
        """Write the remaining records if the catalog accepts them now; stop."""
        self.flush(CLOSE_S)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            left = len(self._waiting)
        if left:
            log.warning(
                "the catalog does not answer: %d records of saves and events are lost; the next start lists the "
                "existing checkpoints",
                left,
            )
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _begin(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=Context().run, args=(self._loop,), name="holdfast-book", daemon=True)
            self._thread.start()

    @contextmanager
    def _hurried(self) -> Iterator[None]:
        """Take the lock and end the linger."""
        with self._changed:
            self._awaited += 1
            self._changed.notify_all()
            try:
                yield
            finally:
                self._awaited -= 1

    def _loop(self) -> None:
        self.database.keep()
        lingers = True
        while not self._closed:
            with self._changed:
                if not self._waiting:
                    self._changed.wait_for(
                        lambda: self._waiting or self._closed or self._missed or not self._known, self._pause_s
                    )
                    lingers = True
                if lingers:
                    # A new record often comes right before a rank's answer, for which training waits, and SQL holds the
                    # interpreter.
                    self._changed.wait_for(lambda: self._awaited or self._closed, LINGER_S)
                lingers = False
                record = self._waiting[0] if self._waiting else _Record("figures of runs", self._idle)
            if self._closed:
                return
            if self._done(record):
                with self._changed:
                    if self._waiting and self._waiting[0] is record:
                        self._waiting.popleft()
                        self._pause_s = RENEW_S
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, RETRY_S)

    def _done(self, record: _Record) -> bool:
        """False if it must be retried."""
        if self._missed:
            self._known = self._missed = False  # what is missed from here on is looked for once more
        if not self._known or self.database.replaced:
            try:
                self.returned()
            except CheckpointError as error:
                self._away(error)
                return False
            self._known = True
        try:
            record.act()
        except (CatalogUnavailable, NoSpace) as error:
            self._away(error)
            return False
        except CheckpointError as error:
            log.error("cannot record in the catalog: %s: %s", record.what, error.detail)
        except Exception:
            log.exception("cannot record in the catalog: %s", record.what)
        if self.database.trouble is not None:
            log.warning("the catalog responds again; %d records are waiting", len(self._waiting))
            self.database.back()
        return True

    def _away(self, error: CheckpointError) -> None:
        self._known = False
        if self.database.trouble is None:
            log.error("%s; saves continue and are recorded when it responds again", error.detail)
        reads = True
        try:
            self._look()
            reads = False
        except CheckpointError:
            pass
        with self._changed:
            self.database.away(error.detail, reads)
            self._changed.notify_all()

    def _idle(self) -> None:
        self._pause_s = LINGER_S if self._renew() else LOOK_S

    def _look(self) -> bool:
        with self.database.read() as session:
            session.execute(select(1)).all()
        return False

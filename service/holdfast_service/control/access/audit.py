"""The audit log in the catalog: acts, with author, address and result.

Adding an entry does not block: a thread writes entries in batches. While the catalog is away entries are queued, up to a
limit; lost ones are counted. Entries older than `days` are removed, and beyond `ENTRIES_MAX` the oldest of those
author-and-kinds that have the most: a flood evicts only itself.
"""

from __future__ import annotations

import logging
import os
import pwd
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from typing import NamedTuple

from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from holdfast_formats import naming, timestamps
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, NoSpace
from holdfast_formats.rest import bodies
from holdfast_formats.rest.access import AuditEntry, By, Via
from holdfast_service.config import AUDIT_DAYS
from holdfast_service.control.catalog.evictions import evictions
from holdfast_service.control.catalog.listing import parse_time
from holdfast_service.control.catalog.pages import bounded, decode_cursor, integer, page
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import AuditRow

log = logging.getLogger(__name__)

ENTRIES_MAX = 100_000
DAYS = AUDIT_DAYS
WAITING_MAX = 10_000  # entries; a few megabytes
BATCH_MAX = 500
LINGER_S = 0.05  # after the first of several, so that they are one transaction
RETRY_S = 1.0
TRIM_EVERY = 500
SETTLE_S = 2.0
CLOSE_S = 5.0
TEXT_MAX = 200
_AUTHOR = tuple[str, str, bool]


class Act(NamedTuple):
    """An entry that is not recorded yet."""

    who: str
    by: By
    address: str
    via: Via
    kind: str
    method: str
    path: str
    status: int
    request: str
    run: str | None = None
    step: int | None = None
    target: str | None = None
    code: str | None = None
    untold: int = 0


class WantedEntries(NamedTuple):
    """A filter of entries; all conditions given must hold."""

    who: str | None = None
    run: str | None = None
    kind: str | None = None
    since: str | None = None
    refused: bool | None = None


class Audit:
    """The audit log of one catalog. Thread-safe."""

    def __init__(self, database: Database, node: str, now: Callable[[], str], days: int = DAYS) -> None:
        self._database, self._node, self._now, self._days = database, node, now, days
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, Act]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._untrimmed = TRIM_EVERY  # the first batch looks
        self.lost = 0
        self.recorded = 0

    @property
    def waiting(self) -> int:
        """How many entries are not in the catalog yet."""
        return len(self._waiting)

    def add(self, act: Act) -> None:
        """Record it soon. Does not block and never raises."""
        with self._changed:
            if self._closed or len(self._waiting) >= WAITING_MAX:
                self.lost += 1
                return
            self._waiting.append((self._now(), act))
            if self._thread is None:
                thread = threading.Thread(target=Context().run, args=(self._loop,), name="holdfast-audit", daemon=True)
                self._thread = thread
                thread.start()
            self._changed.notify_all()

    def record(self, act: Act) -> None:
        """Record it now, in this thread: for a program about to exit. Raises `CatalogUnavailable`."""
        self._write([(self._now(), act)])

    def settle(self, wait_s: float = SETTLE_S) -> bool:
        """Wait until all that was added is in the catalog; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting or self._closed, wait_s) and not self._waiting

    def page(self, wanted: WantedEntries, cursor: str | None, limit: int) -> bodies.Page[AuditEntry]:
        """A page of entries, newest first, of the runs that may be seen; those just added are among them."""
        self.settle()
        before = decode_cursor("audit", cursor)
        asked = select(AuditRow).order_by(AuditRow.id.desc()).limit(bounded(limit) + 1)
        if before is not None:
            asked = asked.where(AuditRow.id < integer(before))
        for column, value in ((AuditRow.who, wanted.who), (AuditRow.run, wanted.run), (AuditRow.kind, wanted.kind)):
            if value is not None:
                asked = asked.where(column == value)
        if wanted.since is not None:
            asked = asked.where(AuditRow.at >= parse_time(wanted.since))
        if wanted.refused is not None:
            denied = AuditRow.status.in_((401, 403))
            asked = asked.where(denied if wanted.refused else ~denied)
        with self._database.read() as session:
            entries = [AuditEntry.model_validate(row, from_attributes=True) for row in session.scalars(asked)]
        return page("audit", entries, limit, lambda entry: entry.id)

    def close(self) -> None:
        """Write what waits, if the catalog takes it now; stop."""
        self.settle(CLOSE_S)
        with self._changed:
            self._closed = True
            self.lost += len(self._waiting)
            left = len(self._waiting)
            self._changed.notify_all()
        if left:
            log.warning("the catalog does not respond: %d audit log entries are lost", left)
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            time.sleep(LINGER_S)
            with self._changed:
                batch = [self._waiting[i] for i in range(min(len(self._waiting), BATCH_MAX))]
            if self._written(batch):
                with self._changed:
                    for _ in batch:
                        self._waiting.popleft()
                    self._changed.notify_all()
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, RETRY_S)

    def _written(self, batch: list[tuple[str, Act]]) -> bool:
        try:
            self._write(batch)
            self.recorded += len(batch)
            self._untrimmed += len(batch)
        except (CatalogUnavailable, NoSpace) as error:
            log.debug("the audit log is waiting for the catalog: %s", error.detail)
            return False
        except CheckpointError as error:
            self.lost += len(batch)
            log.error("%d audit log entries are lost: %s", len(batch), error.detail)
        except Exception:
            self.lost += len(batch)
            log.exception("%d audit log entries are lost", len(batch))
        if self._untrimmed >= TRIM_EVERY:
            self._tidy()
        return True

    def _tidy(self) -> None:
        try:
            self._trim()
            self._untrimmed = 0
        except CheckpointError as error:  # the next batch tries again
            log.debug("cannot shorten the audit log: %s", error.detail)
        except Exception:
            self._untrimmed = 0
            log.exception("shortening the audit log failed")

    def _write(self, batch: list[tuple[str, Act]]) -> None:
        with self._database.write() as session:
            session.execute(insert(AuditRow), [self._row(at, act) for at, act in batch])

    def _row(self, at: str, act: Act) -> dict[str, object]:
        run = act.run if act.run is not None and naming.is_run_name(act.run) else None
        step = act.step if act.step is not None and 0 <= act.step <= naming.STEP_MAX else None
        columns = {
            "who": _fit(act.who, 128),
            "address": _fit(act.address, 64),
            "path": _fit(act.path, TEXT_MAX),
            "target": None if act.target is None else _fit(act.target, TEXT_MAX),
            "method": _fit(act.method, 16),
        }
        return {**act._asdict(), **columns, "run": run, "step": step, "at": at, "node": self._node}

    def _trim(self) -> None:
        with self._database.write() as session:
            spans = session.execute(select(func.min(AuditRow.at), func.max(AuditRow.at))).one()
            if spans[0] is not None and timestamps.later(spans[0], self._days * 86_400) <= spans[1]:
                seen = session.execute(select(AuditRow.id, AuditRow.node, AuditRow.at).order_by(AuditRow.id.desc()))
                if (last := horizon(((one.id, one.node, one.at) for one in seen), self._days)) is not None:
                    session.execute(delete(AuditRow).where(AuditRow.id <= last))
            excess = (session.scalar(select(func.count()).select_from(AuditRow)) or 0) - ENTRIES_MAX
            if excess > 0:
                for author, count in evictions(_by_author(session), excess).items():
                    _remove_oldest(session, author, count)


def horizon(entries: Iterable[tuple[int, str, str]], days: int) -> int | None:
    """The newest of these entries (id, node and time, the newest first) that is older than so many days, as nodes have seen
    them pass: between two entries of one node a tenth of the days at most, and never one clock against another. So no
    clock that jumps empties the log.
    """
    most = days * 86_400.0
    ages: dict[str, float] = {}
    before: dict[str, float] = {}
    for number, node, at in entries:
        time_of = timestamps.seconds_of(at)
        if node in before:
            ages[node] = ages.get(node, 0.0) + min(max(before[node] - time_of, 0.0), most / 10)
        before[node] = time_of
        if max(ages.values(), default=0.0) > most:
            return number
    return None


def local_user() -> str:
    """The name of the local user that this process runs as, or the user's number."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def offline(database: Database, node: str, kind: str, run: str | None = None, step: int | None = None, **more: str) -> None:
    """Record what a program did to a catalog without a service. A failure is logged, since the act is done."""
    act = Act(local_user(), "local", "", "offline", kind, "", "", 200, "", run=run, step=step, target=more.get("target"))
    try:
        Audit(database, node, timestamps.utc_now).record(act)
    except CheckpointError as error:
        log.warning("not recorded in the audit log: %s", error.detail)


def _by_author(session: Session) -> dict[_AUTHOR, int]:
    refused = AuditRow.status.in_((401, 403))
    asked = select(AuditRow.who, AuditRow.kind, refused, func.count()).group_by(AuditRow.who, AuditRow.kind, refused)
    return {(who, kind, bool(denied)): count for who, kind, denied, count in session.execute(asked)}


def _remove_oldest(session: Session, author: _AUTHOR, count: int) -> None:
    who, kind, denied = author
    refused = AuditRow.status.in_((401, 403))
    theirs = (AuditRow.who == who, AuditRow.kind == kind, refused if denied else ~refused)
    last = session.scalar(select(AuditRow.id).where(*theirs).order_by(AuditRow.id).offset(count - 1).limit(1))
    if last is not None:
        session.execute(delete(AuditRow).where(*theirs, AuditRow.id <= last))


def _fit(text: str, most: int) -> str:
    """Truncate text to what a column takes, without control characters or line breaks."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text[:most])[:most]

"""Events in the catalog: the newest ones, and the means to wait for the next one. If there are too many, the oldest go of
those runs and kinds that have the most: a flood pushes out nothing but itself.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy import text as statement
from sqlalchemy.orm import Session

from holdfast_formats.errors import CatalogUnavailable, CheckpointError, NoSpace
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import EVENTS, Event, Level
from holdfast_service.control.catalog.evictions import evictions
from holdfast_service.control.catalog.pages import bounded, decode_cursor, integer, page
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import EventRow, ForgottenEventsRow
from holdfast_service.control.database.visible import visible

log = logging.getLogger(__name__)

EVENTS_MAX = 20_000
TRIM_EVERY = 500
SKIPPED_IDS = 1000  # more than SQLite's log holds between two syncs: a page each is the least that an event takes
_ADDING = 0x486F_6C64_6661_7374  # PostgreSQL's advisory lock for adding an event


class Following(NamedTuple):
    """Events after an id, oldest first, with the oldest kept id, the newest id, and the newest matching id that is not kept
    any more; 0 without one. Only of the runs that the request may see.
    """

    oldest: int
    newest: int
    forgotten: int
    events: list[Event]


class Events:
    """The events of one catalog. Thread-safe. A failure to record one is logged, not raised."""

    def __init__(
        self,
        database: Database,
        node: str,
        now: Callable[[], str],
        later: Callable[[str, Callable[[], object]], object] | None = None,
    ) -> None:
        """`later` has an event recorded when the catalog can be written again."""
        self._database, self._node, self._now = database, node, now
        self.node, self.now = node, now
        self._changed = threading.Condition()
        self._added = 0
        self._listeners: list[Callable[[], None]] = []
        self.hung_up = False
        self._later = later
        self.counts: Counter[str] = Counter()  # by kind, of this process

    def add(
        self, kind: str, text: str, run: str | None = None, step: int | None = None, level: Level = "info", **detail: Any
    ) -> None:
        """Record an event of a declared kind and wake its waiters."""
        at = self._now()
        try:
            self.record(kind, text, run, step, level, at, **detail)
        except (CatalogUnavailable, NoSpace) as error:
            if self._later is None:
                log.error("cannot record the event %r of %s@%s: %s", kind, run, step, error.detail)
            else:
                self._later(f"the event {kind} of {run}", lambda: self.record(kind, text, run, step, level, at, **detail))
        except CheckpointError as error:
            log.error("cannot record the event %r of %s@%s: %s", kind, run, step, error.detail)

    def heard(self, kind: str, count: int) -> None:
        """So many events of a kind were recorded with what they are about (`append`): wake their waiters."""
        self.counts[kind] += count
        self._notify(added=count)

    def enqueue(self, kind: str, text: str, run: str, step: int | None = None, level: Level = "info", **detail: Any) -> None:
        """As `add`, without waiting for the catalog."""
        at = self._now()
        if self._later is None:
            self.record(kind, text, run, step, level, at, **detail)
        else:
            self._later(f"that {text}", lambda: self.record(kind, text, run, step, level, at, **detail))

    def record(
        self,
        kind: str,
        text: str,
        run: str | None = None,
        step: int | None = None,
        level: Level = "info",
        at: str | None = None,
        **detail: Any,
    ) -> None:
        """As `add`, for an event of that time; raises `CatalogUnavailable`."""
        assert kind in EVENTS, kind
        with self._database.write() as session:
            append(session, self._row(kind, text, run, step, at=at or self._now(), level=level, detail=detail))
        self.heard(kind, 1)

    def record_once(self, kind: str, text: str, run: str, step: int, **detail: Any) -> bool:
        """Record an event unless one of this kind with the same details exists, perhaps from another node; True if it was
        new. Raises `CatalogUnavailable`.
        """
        assert kind in EVENTS, kind
        with self._database.write() as session:
            _in_turn(session)
            alike = select(EventRow).where(EventRow.kind == kind, EventRow.run == run, EventRow.step == step)
            if any(row.detail == detail for row in session.scalars(alike)):
                return False
            append(session, self._row(kind, text, run, step, at=self._now(), level="info", detail=detail))
        self.heard(kind, 1)
        return True

    def _row(self, kind: str, text: str, run: str | None, step: int | None, **more: Any) -> EventRow:
        return EventRow(kind=kind, text=text, run=run, step=step, node=self._node, **more)

    def skip_lost_ids(self) -> None:
        """At the start, skip ids that clients may have seen before a power cut undid them."""
        with self._database.write() as session:
            if session.get_bind().dialect.name == "sqlite":
                skipping = statement("UPDATE sqlite_sequence SET seq = seq + :skipped WHERE name = 'events'")
                session.execute(skipping, {"skipped": SKIPPED_IDS})

    def after(self, event_id: int, limit: int, run: str | None = None, kind: str | None = None) -> list[Event]:
        """Events after this id, oldest first."""
        return self.following(event_id, limit, run, kind).events

    def following(self, event_id: int, limit: int, run: str | None = None, kind: str | None = None) -> Following:
        """Events after this id, oldest first, with the range that is kept: a client away for too long has missed some."""
        wanted = select(EventRow).where(EventRow.id > event_id).order_by(EventRow.id).limit(limit)
        if run is not None:
            wanted = wanted.where(EventRow.run == run)
        if kind is not None:
            wanted = wanted.where(EventRow.kind == kind)
        with self._database.read() as session:
            # The newest id first: what is added after that is found, or is newer. The oldest last: what is forgotten
            # meanwhile is missed, and not passed over in silence.
            newest = _bounds(session)[1]
            events = [_event(row) for row in session.scalars(wanted)]
            oldest, ever = _bounds(session)[0], _forgotten(session)
            return Following(oldest, max(newest, ever), ever if run is None else _forgotten(session, run), events)

    def newest(
        self, cursor: str | None, limit: int, run: str | None = None, kind: str | None = None, after: int = 0
    ) -> bodies.Page[Event]:
        """A page of events, newest first, down to the one after id `after`."""
        before = decode_cursor("event", cursor)
        wanted = select(EventRow).where(EventRow.id > after).order_by(EventRow.id.desc()).limit(bounded(limit) + 1)
        if before is not None:
            wanted = wanted.where(EventRow.id < integer(before))
        if run is not None:
            wanted = wanted.where(EventRow.run == run)
        if kind is not None:
            wanted = wanted.where(EventRow.kind == kind)
        with self._database.read() as session:
            events = [_event(row) for row in session.scalars(wanted)]
        return page("event", events, limit, lambda event: event.id)

    def bounds(self) -> tuple[int, int]:
        """The oldest and the newest kept id; (0, 0) without events."""
        with self._database.read() as session:
            return _bounds(session)

    def wait(self, timeout_s: float) -> bool:
        """Wait until this process adds an event; False on timeout. Other nodes' events have to be polled."""
        with self._changed:
            before = self._added
            return self._changed.wait_for(lambda: self._added != before or self.hung_up, timeout_s) and not self.hung_up

    def listen(self, heard: Callable[[], None]) -> Callable[[], None]:
        """Call `heard`, in any thread, whenever this process adds an event; call the result to end that."""
        with self._changed:
            self._listeners.append(heard)
        return lambda: self._listeners.remove(heard)

    def hang_up(self) -> None:
        """End all waits: the service is closing. Events can still be added."""
        self.hung_up = True
        self._notify(added=0)

    def _notify(self, added: int) -> None:
        with self._changed:
            self._added += added
            self._changed.notify_all()
            listeners = list(self._listeners)
        for heard in listeners:
            heard()


def append(session: Session, row: EventRow) -> None:
    """Record an event in this transaction, as the last of what it locks."""
    assert row.kind in EVENTS, row.kind
    _in_turn(session)
    session.add(row)
    session.flush()
    _trim(session, row.id)


def _trim(session: Session, newest: int) -> None:
    """Remove the oldest events of the most frequent kinds, now and then. Ids have gaps, so rows are counted."""
    if newest % TRIM_EVERY != 0:
        return
    asked = select(EventRow.run, EventRow.kind, func.count()).group_by(EventRow.run, EventRow.kind)
    counts = {(run, kind): int(count) for run, kind, count in session.execute(asked)}
    forgotten: dict[str, int] = {}
    for (run, kind), count in evictions(counts, sum(counts.values()) - EVENTS_MAX).items():
        alike = (EventRow.run == run, EventRow.kind == kind)  # without a run: IS NULL
        last = session.scalar(select(EventRow.id).where(*alike).order_by(EventRow.id).offset(count - 1).limit(1))
        if last is not None:
            session.execute(delete(EventRow).where(*alike, EventRow.id <= last))
            forgotten[run or ""] = max(last, forgotten.get(run or "", 0))
    for of, number in forgotten.items():
        before = session.get(ForgottenEventsRow, of)
        session.merge(ForgottenEventsRow(run=of, newest=max(number, 0 if before is None else before.newest)))


def _in_turn(session: Session) -> None:
    """Make ids visible in order, so that a reader of one id never misses a lower one. SQLite has one writer anyway."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(_ADDING)))


def _bounds(session: Session) -> tuple[int, int]:
    oldest, newest = session.execute(select(func.min(EventRow.id), func.max(EventRow.id))).one()
    return oldest or 0, newest or 0


def _forgotten(session: Session, run: str | None = None) -> int:
    wanted = select(func.max(ForgottenEventsRow.newest))
    return session.scalar(wanted if run is None else wanted.where(ForgottenEventsRow.run == run)) or 0


def _event(row: EventRow) -> Event:
    """The event as the present request may see it: without a run's former name where runs of that name are not visible."""
    event = Event.model_validate(row, from_attributes=True)
    old = event.detail.get("old") if event.kind == "run-renamed" else None
    if isinstance(old, str) and not visible(old):
        return event.model_copy(update={"text": f"a run was renamed to {event.run}", "detail": {}})
    return event

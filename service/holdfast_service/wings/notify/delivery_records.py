"""The state of each target's alerts in the catalog, from which restarted daemons and other nodes continue."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session

from holdfast_formats.rest.notifications import AlertLevel
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import DeliveryRow, NoticeRow
from holdfast_service.wings.notify.schedule import NoticeKey, NotifiedAlert

PROBLEM_MAX = 500  # characters


class DeliveryStatus(NamedTuple):
    """Results of deliveries to one target, over all nodes and daemons."""

    sent: int = 0
    failed: int = 0
    dropped: int = 0
    last_sent: str | None = None
    node: str | None = None
    problem: str | None = None
    problem_since: str | None = None
    firing: int = 0


@dataclass
class TargetChanges:
    """Pending changes for one target: alerts sent or over, accepted messages, and alerts that were never sent."""

    put: dict[NoticeKey, NotifiedAlert] = field(default_factory=dict)
    gone: set[NoticeKey] = field(default_factory=set)
    dropped: int = 0
    sent: int = 0

    def add(self, notified_alert: NotifiedAlert) -> None:
        self.put[notified_alert.key] = notified_alert
        self.gone.discard(notified_alert.key)

    def remove(self, key: NoticeKey) -> None:
        self.put.pop(key, None)
        self.gone.add(key)

    def count(self, *, dropped: int = 0, sent: int = 0) -> None:
        self.dropped += dropped
        self.sent += sent


class DeliveryRecords:
    """The catalog's tables about notifications. Thread-safe. Raises `CatalogUnavailable`."""

    def __init__(self, database: Database, node: str) -> None:
        self._database, self._node = database, node

    def known(self, target: str) -> dict[NoticeKey, NotifiedAlert]:
        """A target's alerts, sent or to be sent."""
        with self._database.read() as session:
            rows = session.scalars(select(NoticeRow).where(NoticeRow.target == target))
            return {(notified := _told(row)).key: notified for row in rows}

    def note(self, target: str, changes: TargetChanges) -> None:
        """Write a target's changes in one transaction."""
        with self._database.write() as session:
            for notified in changes.put.values():
                session.merge(_row(target, notified))
            _forget(session, target, changes.gone)
            if changes.dropped:
                self._update(session, target, dropped=DeliveryRow.dropped + changes.dropped)
            if changes.sent:
                self._accepted(session, target, changes.sent)

    def tested(self, target: str) -> None:
        with self._database.write() as session:
            self._accepted(session, target, 1)

    def failed(self, target: str, problem: str) -> bool:
        """Record a failed delivery; True if the one before succeeded, or there was none."""
        with self._database.write() as session:
            first = session.scalar(select(DeliveryRow.problem).where(DeliveryRow.target == target)) is None
            since = {"problem_since": utc_now()} if first else {}
            self._update(session, target, failed=DeliveryRow.failed + 1, problem=problem[:PROBLEM_MAX], **since)
            return first

    def delivered(self, targets: Collection[str]) -> dict[str, DeliveryStatus]:
        notified = (NoticeRow.target.in_(targets), NoticeRow.told > 0)
        with self._database.read() as session:
            counted = session.execute(select(NoticeRow.target, func.count()).where(*notified).group_by(NoticeRow.target))
            firing = {target: count for target, count in counted}
            rows = {row.target: row for row in session.scalars(select(DeliveryRow).where(DeliveryRow.target.in_(targets)))}
            return {name: _delivered(rows.get(name), firing.get(name, 0)) for name in targets}

    def keep_only(self, targets: Collection[str]) -> None:
        """Forget everything about targets that no longer exist."""
        with self._database.write() as session:
            for table in (NoticeRow, DeliveryRow):
                session.execute(delete(table).where(table.target.not_in(targets)))

    def _accepted(self, session: Session, target: str, messages: int) -> None:
        sent, healthy = DeliveryRow.sent + messages, {"problem": None, "problem_since": None}
        self._update(session, target, sent=sent, last_sent=utc_now(), **healthy)

    def _update(self, session: Session, target: str, **values: Any) -> None:
        """Change a target's row, which this node writes last."""
        if session.get(DeliveryRow, target) is None:
            session.add(DeliveryRow(target=target, node=self._node, sent=0, failed=0, dropped=0))
        session.execute(update(DeliveryRow).where(DeliveryRow.target == target).values(node=self._node, **values))


def _forget(session: Session, target: str, keys: Iterable[NoticeKey]) -> None:
    for key in keys:
        alike = (NoticeRow.target == target, NoticeRow.run == key.run, NoticeRow.code == key.code)
        session.execute(delete(NoticeRow).where(*alike))


def _row(target: str, notified_alert: NotifiedAlert) -> NoticeRow:
    return NoticeRow(
        target=target,
        run=notified_alert.key.run,
        code=notified_alert.key.code,
        level=notified_alert.level,
        text=notified_alert.text,
        hint=notified_alert.hint,
        step=notified_alert.step,
        since=notified_alert.since,
        told=notified_alert.times,
        last=notified_alert.last,
    )


def _told(row: NoticeRow) -> NotifiedAlert:
    level = cast(AlertLevel, row.level)
    last = row.since if row.last is None else row.last  # an alert that was not sent yet may be stored without
    return NotifiedAlert(NoticeKey(row.run, row.code), level, row.text, row.hint, row.step, row.since, row.told, last)


def _delivered(row: DeliveryRow | None, firing: int) -> DeliveryStatus:
    if row is None:
        return DeliveryStatus(firing=firing)
    ended = (row.last_sent, row.node, row.problem, row.problem_since)
    return DeliveryStatus(row.sent, row.failed, row.dropped, *ended, firing)

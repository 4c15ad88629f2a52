"""The state of each target's alerts in the catalog, from which restarted daemons and other nodes continue."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from holdfast_formats.moments import utc_now
from holdfast_formats.rest.telling import AlertLevel
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import DeliveryRow, NoticeRow
from holdfast_service.telling.due import NoticeKey, Told

PROBLEM_MAX = 500  # characters


class Delivered(NamedTuple):
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
class Changes:
    """Pending changes for one target: alerts sent or over, accepted messages, and alerts that were never sent."""

    put: dict[NoticeKey, Told] = field(default_factory=dict)
    gone: set[NoticeKey] = field(default_factory=set)
    dropped: int = 0
    sent: int = 0


class Notices:
    """The catalog's tables about notifications. Thread-safe. Raises `CatalogUnavailable`."""

    def __init__(self, database: Database, node: str) -> None:
        self._database, self._node = database, node

    def known(self, target: str) -> dict[NoticeKey, Told]:
        """A target's alerts, sent or to be sent."""
        with self._database.read() as session:
            rows = session.scalars(select(NoticeRow).where(NoticeRow.target == target))
            return {(told := _told(row)).key: told for row in rows}

    def note(self, target: str, changes: Changes) -> None:
        """Write a target's changes in one transaction."""
        with self._database.write() as session:
            for told in changes.put.values():
                session.merge(_row(target, told))
            _forget(session, target, changes.gone)
            if changes.dropped:
                self._fares(session, target).dropped += changes.dropped
            if changes.sent:
                self._accepted(session, target, changes.sent)

    def tested(self, target: str) -> None:
        with self._database.write() as session:
            self._accepted(session, target, 1)

    def failed(self, target: str, problem: str) -> bool:
        """Record a failed delivery; True if the one before succeeded, or there was none."""
        with self._database.write() as session:
            row = self._fares(session, target)
            first = row.problem is None
            row.failed += 1
            row.problem_since = row.problem_since if not first else utc_now()
            row.problem = problem[:PROBLEM_MAX]
            return first

    def delivered(self, targets: Collection[str]) -> dict[str, Delivered]:
        told = (NoticeRow.target.in_(targets), NoticeRow.told > 0)
        with self._database.read() as session:
            counted = session.execute(select(NoticeRow.target, func.count()).where(*told).group_by(NoticeRow.target))
            firing = {target: count for target, count in counted}
            rows = {row.target: row for row in session.scalars(select(DeliveryRow).where(DeliveryRow.target.in_(targets)))}
            return {name: _delivered(rows.get(name), firing.get(name, 0)) for name in targets}

    def keep_only(self, targets: Collection[str]) -> None:
        """Forget everything about targets that no longer exist."""
        with self._database.write() as session:
            for table in (NoticeRow, DeliveryRow):
                session.execute(delete(table).where(table.target.not_in(targets)))

    def _accepted(self, session: Session, target: str, messages: int) -> None:
        row = self._fares(session, target)
        row.sent += messages
        row.last_sent, row.problem, row.problem_since = utc_now(), None, None

    def _fares(self, session: Session, target: str) -> DeliveryRow:
        row = session.get(DeliveryRow, target)
        if row is None:
            row = DeliveryRow(target=target, node=self._node, sent=0, failed=0, dropped=0)
            session.add(row)
        row.node = self._node
        return row


def _forget(session: Session, target: str, keys: Iterable[NoticeKey]) -> None:
    for key in keys:
        alike = (NoticeRow.target == target, NoticeRow.run == key.run, NoticeRow.code == key.code)
        session.execute(delete(NoticeRow).where(*alike))


def _row(target: str, told: Told) -> NoticeRow:
    return NoticeRow(
        target=target,
        run=told.key.run,
        code=told.key.code,
        level=told.level,
        text=told.text,
        hint=told.hint,
        step=told.step,
        since=told.since,
        told=told.times,
        last=told.last,
    )


def _told(row: NoticeRow) -> Told:
    level = cast(AlertLevel, row.level)
    return Told(NoticeKey(row.run, row.code), level, row.text, row.hint, row.step, row.since, row.told, row.last)


def _delivered(row: DeliveryRow | None, firing: int) -> Delivered:
    if row is None:
        return Delivered(firing=firing)
    ended = (row.last_sent, row.node, row.problem, row.problem_since)
    return Delivered(row.sent, row.failed, row.dropped, *ended, firing)

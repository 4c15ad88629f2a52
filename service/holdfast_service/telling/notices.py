"""What each target was told, in the catalog: daemons that are started again, and other nodes, go on from there."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple, cast

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session

from holdfast_formats.moments import utc_now
from holdfast_formats.rest.telling import AlertLevel
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import DeliveryRow, NoticeRow
from holdfast_service.telling.due import NoticeKey, Plan, Told

PROBLEM_MAX = 500  # characters


class Delivered(NamedTuple):
    """How messages to one target have fared, over all nodes and daemons."""

    sent: int = 0
    failed: int = 0
    dropped: int = 0
    last_sent: str | None = None
    node: str | None = None
    problem: str | None = None
    problem_since: str | None = None
    firing: int = 0


class Notices:
    """The catalog's tables about notifications. Thread-safe. Raises `CatalogUnavailable`."""

    def __init__(self, database: Database, node: str) -> None:
        self._database, self._node = database, node

    def known(self, target: str) -> dict[NoticeKey, Told]:
        """What a target was told of, and is going to be."""
        with self._database.read() as session:
            rows = session.scalars(select(NoticeRow).where(NoticeRow.target == target))
            return {(told := _told(row)).key: told for row in rows}

    def prepare(self, target: str, made: Plan) -> None:
        """Note alerts that are new, before anything is sent, so that they keep their ids; forget those that are over."""
        if not made.added and not made.forgotten:
            return
        with self._database.write() as session:
            for told in made.added:
                session.merge(_row(target, told))
            _forget(session, target, made.forgotten)
            if made.dropped:
                self._fares(session, target).dropped += made.dropped

    def sent(self, target: str, made: Plan, now: float) -> None:
        """A message was accepted."""
        with self._database.write() as session:
            for told in made.firing:
                session.merge(_row(target, told._replace(times=told.times + 1, last=now)))
            _forget(session, target, [told.key for told in made.recovered])
            self._accepted(session, target)

    def tested(self, target: str) -> None:
        """A test message was accepted."""
        with self._database.write() as session:
            self._accepted(session, target)

    def failed(self, target: str, problem: str) -> bool:
        """A message was not accepted; whether the one before it was, or there was none."""
        with self._database.write() as session:
            row = self._fares(session, target)
            first = row.problem is None
            row.failed += 1
            row.problem_since = row.problem_since if not first else utc_now()
            row.problem = problem[:PROBLEM_MAX]
            return first

    def delivered(self, targets: Collection[str]) -> dict[str, Delivered]:
        """How messages to these targets have fared."""
        told = (NoticeRow.target.in_(targets), NoticeRow.told > 0)
        with self._database.read() as session:
            counted = session.execute(select(NoticeRow.target, func.count()).where(*told).group_by(NoticeRow.target))
            firing = {target: count for target, count in counted}
            rows = {row.target: row for row in session.scalars(select(DeliveryRow).where(DeliveryRow.target.in_(targets)))}
            return {name: _delivered(rows.get(name), firing.get(name, 0)) for name in targets}

    def keep_only(self, targets: Collection[str]) -> None:
        """Forget what targets that are no more were told, and how that fared."""
        with self._database.write() as session:
            for table in (NoticeRow, DeliveryRow):
                session.execute(delete(table).where(table.target.not_in(targets)))

    def _accepted(self, session: Session, target: str) -> None:
        row = self._fares(session, target)
        row.sent += 1
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

"""Acknowledgements of alerts, with author and end. They end with the alert, so that a repeated one counts again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from sqlalchemy import delete, select

from holdfast_formats.rest.measurements import Acknowledgement
from holdfast_formats.timestamps import later, utc_now
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import AcknowledgementRow
from holdfast_service.control.database.visible import sees_all, visible
from holdfast_service.control.insight.cached_value import CachedValue

log = logging.getLogger(__name__)

CLOCKS_DIFFER_S = 60.0  # between nodes, at most
FRESH_S = 0.5  # what another daemon has noted is known so soon; what this one has, at once


class AlertKey(NamedTuple):
    """The identity of an alert: a run, or "" for none, and the `subject`, a node or a replica, or "" for none."""

    run: str
    code: str
    subject: str = ""


class Acknowledgements:
    """The acknowledgements of one catalog. Thread-safe. A request sees those of its runs only."""

    def __init__(self, database: Database, now: Callable[[], str] = utc_now) -> None:
        self._database, self._now = database, now
        self._last: dict[AlertKey, Acknowledgement] = {}
        self._read = CachedValue(self._look, FRESH_S, FRESH_S)

    def known(self, runs: Collection[str] | None = None) -> Mapping[AlertKey, Acknowledgement]:
        """The present ones, of some runs or of all, as far as the request may see them."""
        acknowledgements = self.everything()
        if runs is None and sees_all():
            return acknowledgements
        return {key: one for key, one in acknowledgements.items() if visible(key.run) and (runs is None or key.run in runs)}

    def everything(self) -> Mapping[AlertKey, Acknowledgement]:
        """All present ones, for every token; the same object as long as nothing changed."""
        acknowledged, now = self._read.get(), self._now()
        if not any(_over(one, now) for one in acknowledged.values()):
            return acknowledged
        self._read.renew()
        return {key: one for key, one in acknowledged.items() if not _over(one, now)}

    def _look(self) -> dict[AlertKey, Acknowledgement]:
        now = self._now()
        with self._database.read() as session:
            rows = session.scalars(select(AcknowledgementRow)).all()
            by_key = {AlertKey(row.run, row.code, row.subject): _made(row) for row in rows}
        current = {key: one for key, one in by_key.items() if not _over(one, now)}
        if current != self._last:
            self._last = current
        return self._last

    def set(self, key: AlertKey, acknowledgement: Acknowledgement) -> None:
        """Acknowledge an alert; replaces an earlier acknowledgement."""
        with self._database.write() as session:
            session.merge(AcknowledgementRow(**key._asdict(), **acknowledgement.model_dump()))
        self._read.renew()

    def remove(self, keys: Collection[AlertKey]) -> None:
        """Count the alerts again, if they still exist."""
        row = AcknowledgementRow
        with self._database.write() as session:
            for key in keys:
                session.execute(delete(row).where(row.run == key.run, row.code == key.code, row.subject == key.subject))
        self._read.renew()

    def forget_ended(self, still: Callable[[Collection[str]], Collection[AlertKey]]) -> None:
        """Delete acknowledgements of ended alerts, and expired ones. `still` returns the alerts of runs, and of nodes and
        replicas for "".
        """
        now = self._now()
        with self._database.read() as session:
            rows = [
                (AlertKey(row.run, row.code, row.subject), _made(row)) for row in session.scalars(select(AcknowledgementRow))
            ]
        if not rows:
            return
        keys = still({key.run for key, _ in rows})
        over = [key for key, made in rows if key not in keys or _over(made, now)]
        if over:
            self.remove(over)


def _made(row: AcknowledgementRow) -> Acknowledgement:
    return Acknowledgement(by=row.by, at=row.at, until=row.until)


def _over(acknowledgement: Acknowledgement, now: str) -> bool:
    """Whether it has expired; or it lies in the future, since a clock was ahead: it would hide the alert until then."""
    if acknowledgement.until is None:
        return False
    return acknowledgement.until <= now or (
        acknowledgement.at is not None and acknowledgement.at > later(now, CLOCKS_DIFFER_S)
    )

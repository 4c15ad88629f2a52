"""A target's sent alerts: the rows of the catalog, and changes that could not be written there yet.

A catalog that answers but takes no writes, as on a full disk, is a reason for alerts. They are sent once: the state stays
here until it is written, so that an accepted message is not repeated.
"""

from __future__ import annotations

import logging

from holdfast_formats.errors import CheckpointError
from holdfast_service.wings.notify.delivery_records import DeliveryRecords, TargetChanges
from holdfast_service.wings.notify.schedule import NoticeKey, NotifiedAlert, Plan

log = logging.getLogger(__name__)


class TargetState:
    """For one target's thread."""

    def __init__(self, notices: DeliveryRecords, target: str) -> None:
        self._notices, self._target = notices, target
        self._changes = TargetChanges()

    def known(self) -> dict[NoticeKey, NotifiedAlert]:
        """The target's alerts, sent or to be sent; `CatalogUnavailable`."""
        known = {**self._notices.known(self._target), **self._changes.put}
        return {key: notified for key, notified in known.items() if key not in self._changes.gone}

    def prepare(self, plan: Plan) -> None:
        """Record new alerts before sending, so that they keep their ids; forget those that are over."""
        for notified in plan.added:
            self._changes.add(notified)
        for key in plan.forgotten:
            self._changes.remove(key)
        self._changes.count(dropped=plan.dropped)
        self._note()

    def sent(self, plan: Plan, now: float) -> None:
        for notified in plan.firing:
            self._changes.add(notified._replace(times=notified.times + 1, last=now))
        for notified in plan.recovered:
            self._changes.remove(notified.key)
        self._changes.count(sent=1)
        self._note()

    def hand_over(self) -> None:
        """Another node sends now: only its records count."""
        self._changes = TargetChanges()

    def _note(self) -> None:
        if self._changes == TargetChanges():
            return
        try:
            self._notices.note(self._target, self._changes)
        except CheckpointError as away:
            log.info("cannot record yet what was sent to %s: %s", self._target, away.detail)
        else:
            self._changes = TargetChanges()

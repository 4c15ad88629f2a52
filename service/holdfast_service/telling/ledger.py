"""A target's sent alerts: the rows of the catalog, and changes that could not be written there yet.

A catalog that answers but takes no writes, as on a full disk, is a reason for alerts. They are sent once: the state stays
here until it is written, so that an accepted message is not repeated.
"""

from __future__ import annotations

import logging

from holdfast_formats.errors import CheckpointError
from holdfast_service.telling.due import NoticeKey, Plan, Told
from holdfast_service.telling.notices import Changes, Notices

log = logging.getLogger(__name__)


class Ledger:
    """For one target's thread."""

    def __init__(self, notices: Notices, target: str) -> None:
        self._notices, self._target = notices, target
        self._changes = Changes()

    def known(self) -> dict[NoticeKey, Told]:
        """The target's alerts, sent or to be sent; `CatalogUnavailable`."""
        known = {**self._notices.known(self._target), **self._changes.put}
        return {key: told for key, told in known.items() if key not in self._changes.gone}

    def prepare(self, made: Plan) -> None:
        """Record new alerts before sending, so that they keep their ids; forget those that are over."""
        for told in made.added:
            self._put(told)
        for key in made.forgotten:
            self._remove(key)
        self._changes.dropped += made.dropped
        self._note()

    def sent(self, made: Plan, now: float) -> None:
        for told in made.firing:
            self._put(told._replace(times=told.times + 1, last=now))
        for told in made.recovered:
            self._remove(told.key)
        self._changes.sent += 1
        self._note()

    def hand_over(self) -> None:
        """Another node sends now: only its records count."""
        self._changes = Changes()

    def _put(self, told: Told) -> None:
        self._changes.put[told.key] = told
        self._changes.gone.discard(told.key)

    def _remove(self, key: NoticeKey) -> None:
        self._changes.put.pop(key, None)
        self._changes.gone.add(key)

    def _note(self) -> None:
        if self._changes == Changes():
            return
        try:
            self._notices.note(self._target, self._changes)
        except CheckpointError as away:
            log.info("what %s was sent cannot be recorded yet: %s", self._target, away.detail)
        else:
            self._changes = Changes()

"""What was refused at the door: counted always, logged and recorded as an event now and then, so that nobody fills the
log.
"""

from __future__ import annotations

import logging
from collections import Counter
from threading import Lock

from holdfast_formats.errors import CheckpointError
from holdfast_service.api.access.throttle import Throttle
from holdfast_service.control.access.tokens import without_secrets
from holdfast_service.control.catalog.events import Events

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 120


class Refusals:
    """The refusals of one process. Thread-safe. What a caller sent is shown cut and quoted, its token never."""

    def __init__(self, events: Events) -> None:
        self.counts: Counter[str] = Counter()
        self._events = events
        self._lock = Lock()
        self._throttle = Throttle()

    def add(self, peer: str, method: str, path: str, error: CheckpointError) -> None:
        """Count a refusal; tell of it if this peer has not been told of for a while, and how many there were in between."""
        with self._lock:
            self.counts[error.code] += 1
        untold = self._throttle.due((peer, error.code))
        if untold is None:
            return
        shown = f"{method[:16]} {without_secrets(path)[:SHOWN_CHARACTERS]!r}"
        more = f", and {untold} more since the last message" if untold else ""
        detail = without_secrets(error.detail)[:SHOWN_CHARACTERS]
        log.warning("refused %s from %s: %s [%s]%s", shown, peer, detail, error.code, more)
        text = f"refused {shown} from {peer}: {error.code}"
        self._events.add("request-refused", text, None, None, "warning", peer=peer, code=error.code, untold=untold)

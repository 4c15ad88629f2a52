"""What was refused at the door: counted always, logged and recorded as an event now and then, so that nobody fills the
log.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from threading import Lock

from holdfast_formats.errors import CheckpointError
from holdfast_service.control.catalog.events import Events

log = logging.getLogger(__name__)

TOLD_EVERY_S = 60.0  # of one peer and one code
PEERS_MAX = 1024
TOLD_A_MINUTE_MAX = 60  # of all peers together
SHOWN_CHARACTERS = 120


class Refusals:
    """The refusals of one process. Thread-safe. What a caller sent is shown cut and quoted, its token never."""

    def __init__(self, events: Events) -> None:
        self.counts: Counter[str] = Counter()
        self._events = events
        self._lock = Lock()
        self._told: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._minute = (0.0, 0)

    def add(self, peer: str, method: str, path: str, error: CheckpointError) -> None:
        """Count a refusal; tell of it if this peer has not been told of for a while, and how many there were in between."""
        with self._lock:
            self.counts[error.code] += 1
            untold = self._due((peer, error.code), time.monotonic())
        if untold is None:
            return
        shown = f"{method[:16]} {path[:SHOWN_CHARACTERS]!r}"
        more = f", and {untold} more since the last message" if untold else ""
        log.warning("refused %s from %s: %s [%s]%s", shown, peer, error.detail[:SHOWN_CHARACTERS], error.code, more)
        text = f"refused {shown} from {peer}: {error.code}"
        self._events.add("request-refused", text, None, None, "warning", peer=peer, code=error.code, untold=untold)

    def _due(self, key: tuple[str, str], now: float) -> int | None:
        """How many of this kind nobody was told of; None when it is too early to tell of one more."""
        at, untold = self._told.pop(key, (-TOLD_EVERY_S, 0))
        began, told = self._minute if now - self._minute[0] < 60 else (now, 0)
        due = now - at >= TOLD_EVERY_S and told < TOLD_A_MINUTE_MAX
        self._told[key] = (now, 0) if due else (at, untold + 1)
        self._minute = (began, told + due)
        if len(self._told) > PEERS_MAX:
            self._told.popitem(last=False)
        return untold if due else None

"""Refused requests: always counted, logged and recorded as an event now and then, so that no caller can fill the log."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from threading import Lock

from holdfast_formats.errors import CheckpointError
from holdfast_service.control.access.tokens import without_secrets
from holdfast_service.control.catalog.events import Events

log = logging.getLogger(__name__)

SHOWN_CHARACTERS = 120
REPORT_EVERY_S = 60.0  # of one key
KEYS_MAX = 1024
REPORTS_A_MINUTE_MAX = 60  # of all keys of one author together


class Throttle:
    """Limits reports: one a minute for each key, and so many of each author together, so that no author uses up another's.
    Thread-safe, and bounded in memory.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._reported: OrderedDict[tuple[str, ...], tuple[float, int]] = OrderedDict()
        self._minutes: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def due(self, key: tuple[str, ...], author: str = "") -> int | None:
        """How many of this key were left out since the last report; None when it is too early for one more."""
        with self._lock:
            now = time.monotonic()
            at, left_out = self._reported.pop(key, (float("-inf"), 0))
            began, reports = self._minutes.pop(author, (now, 0))
            began, reports = (began, reports) if now - began < 60 else (now, 0)
            due = now - at >= REPORT_EVERY_S and reports < REPORTS_A_MINUTE_MAX
            self._reported[key] = (now, 0) if due else (at, left_out + 1)
            self._minutes[author] = (began, reports + due)
            for counts in (self._reported, self._minutes):
                if len(counts) > KEYS_MAX:
                    counts.popitem(last=False)
            return left_out if due else None

    def reset(self) -> None:
        with self._lock:
            self._reported.clear()
            self._minutes.clear()

    def __len__(self) -> int:
        return len(self._reported)


class Refusals:
    """The refusals of one process. Thread-safe. A caller's input is shown cut and quoted, its token never."""

    def __init__(self, events: Events) -> None:
        self.counts: Counter[str] = Counter()
        self._events = events
        self._lock = Lock()
        self._throttle = Throttle()

    def add(self, peer: str, method: str, path: str, error: CheckpointError) -> None:
        """Count a refusal; report it, with the number of unreported ones, if none of this peer was reported for a while."""
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

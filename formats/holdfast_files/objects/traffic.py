"""Counts requests to object storage, their bytes and their repetitions, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple


class RequestCount(NamedTuple):
    """Requests of one kind. `retries` of them repeated one that had failed; bytes are those of bodies."""

    sent: int = 0
    retries: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0


class Traffic:
    """A counter, such as of one save. Safe for threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._kinds: dict[str, RequestCount] = {}

    def add(self, kind: str, one: RequestCount) -> None:
        with self._lock:
            before = self._kinds.get(kind, RequestCount())
            self._kinds[kind] = RequestCount(*(a + b for a, b in zip(before, one, strict=True)))

    def by_kind(self) -> Mapping[str, RequestCount]:
        """The counts until now, by get, head, put, delete, list, copy, begin, part, complete, abort and uploads."""
        with self._lock:
            return dict(self._kinds)

"""A cached value that takes a while to compute, refreshed in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextvars import Context
from typing import Generic, TypeVar

from holdfast_formats.errors import CheckpointError

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class CachedValue(Generic[Value]):
    """Thread-safe. A value older than `fresh_s` is returned once more while a new one is computed; one older than `old_s`
    never.
    """

    def __init__(self, make: Callable[[], Value], fresh_s: float, old_s: float) -> None:
        self._make, self._fresh_s, self._old_s = make, fresh_s, old_s
        self._making = threading.Lock()
        self._known: tuple[float, Value] | None = None
        self._turn = 0

    def get(self) -> Value:
        """The value; raises the error of computing it when none is recent enough."""
        known = self._recent(self._old_s)
        if known is None:
            with self._making:
                known = self._recent(self._old_s)  # a faster thread has made it meanwhile
                return self._remember() if known is None else known[1]
        self._freshen()
        return known[1]

    def last(self, wait_s: float = 0.0) -> Value | None:
        """The last value, however old; None before there was one. An old one is computed again, which is waited for this
        long.
        """
        self._freshen()
        if wait_s and self._recent(self._fresh_s) is None and self._making.acquire(timeout=wait_s):
            self._making.release()
        return None if self._known is None else self._known[1]

    def renew(self) -> None:
        """Make the next `get` return a value that is computed after this call."""
        self._turn += 1
        self._known = None

    def _freshen(self) -> None:
        if self._recent(self._fresh_s) is None and self._making.acquire(blocking=False):
            threading.Thread(target=self._again, name="holdfast-remembered", daemon=True).start()

    def _recent(self, age_s: float) -> tuple[float, Value] | None:
        known = self._known
        return known if known is not None and time.monotonic() - known[0] < age_s else None

    def _remember(self) -> Value:
        turn = self._turn
        value = Context().run(self._make)  # not as the request that happens to come first: others are given it as well
        if turn == self._turn:
            self._known = (time.monotonic(), value)
        return value

    def _again(self) -> None:
        try:
            self._remember()
        except CheckpointError as error:  # `get` raises it once the value is too old
            log.warning("%s", error.detail)
        finally:
            self._making.release()

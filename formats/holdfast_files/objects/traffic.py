"""Counts requests to object storage, their bytes and their repetitions, by kind, and remembers what is refused."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from threading import Lock
from typing import NamedTuple

GROUPS_MAX = 256
RECENT_S = 60.0  # what fails in passing is repeated sooner
WRITES = ("put", "begin", "part", "complete", "copy", "list", "uploads", "parts")  # what clouds charge as writes and lists
READS = ("get", "head")  # deletions and given up uploads are free
AWS_USD_PER_WRITE, AWS_USD_PER_READ = 0.005 / 1000, 0.0004 / 1000  # docs/object-storage.md has the date and the source


class RequestCount(NamedTuple):
    """Requests of one kind. `retries` of them repeated one that had failed; bytes are those of bodies."""

    sent: int = 0
    retries: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def less(self, before: RequestCount) -> RequestCount:
        """What came since then; all of it if counting has begun again since."""
        return self if self.sent < before.sent else RequestCount(*(a - b for a, b in zip(self, before, strict=True)))


class Failing(NamedTuple):
    """A kind of request that fails: the newest answer, such as "503 SlowDown", since when and at last when, in seconds since
    1970. `passes`: repeated, it may succeed.
    """

    kind: str
    answer: str
    passes: bool
    since_s: float
    last_s: float


def _no_group(key: str) -> Hashable | None:
    return None


class Traffic:
    """A counter, such as of one save. Safe for threads."""

    def __init__(self, group: Callable[[str], Hashable | None] = _no_group) -> None:
        """`group` names what an object belongs to, by its whole key, such as a checkpoint: requests are counted by it too,
        for the `GROUPS_MAX` last ones.
        """
        self._lock, self._group = Lock(), group
        self._kinds: dict[str, RequestCount] = {}
        self._groups: OrderedDict[Hashable, dict[str, RequestCount]] = OrderedDict()
        self._failing: dict[str, Failing] = {}
        self._answered_s = 0.0

    @property
    def answered_s(self) -> float:
        """When a request was carried out last, in seconds since 1970; 0 if none was yet."""
        with self._lock:
            return self._answered_s

    def add(self, kind: str, one: RequestCount, key: str = "") -> None:
        group = self._group(key)
        with self._lock:
            _add(self._kinds, kind, one)
            if group is None:
                return
            _add(self._groups.setdefault(group, {}), kind, one)
            while len(self._groups) > GROUPS_MAX:
                self._groups.popitem(last=False)

    def settle(self, kind: str, failure: str = "", passes: bool = False) -> None:
        """A request was answered, or failed: for the last time, or until it is repeated."""
        now = time.time()
        with self._lock:
            if not failure:
                self._failing.pop(kind, None)
                self._answered_s = now
                return
            before = self._failing.get(kind)
            self._failing[kind] = Failing(kind, failure, passes, now if before is None else before.since_s, now)

    def by_kind(self) -> Mapping[str, RequestCount]:
        """The counts until now, by get, head, put, delete, list, copy, begin, part, complete, abort and uploads."""
        with self._lock:
            return dict(self._kinds)

    def of(self, group: Hashable) -> Mapping[str, RequestCount]:
        """The same of one group, since `take` was last called for it."""
        with self._lock:
            return dict(self._groups.get(group, {}))

    def take(self, group: Hashable) -> Mapping[str, RequestCount]:
        """The same of one group, since this was last asked."""
        with self._lock:
            return self._groups.pop(group, {})

    def forget_failures(self) -> None:
        """What was refused until now was meant to be."""
        with self._lock:
            self._failing.clear()

    def failing_since(self, kind: str) -> float | None:
        """Since when requests of a kind fail, in seconds since 1970; None where the last one was carried out."""
        with self._lock:
            found = self._failing.get(kind)
        return None if found is None else found.since_s

    def failing(self) -> list[Failing]:
        """What failed when it was last asked, since the longest time first.

        Most kinds are asked seldom. So a failure that may pass counts while it is `RECENT_S` old, and then until anything
        is answered.
        """
        recent = time.time() - RECENT_S
        with self._lock:
            found = [one for one in self._failing.values() if not one.passes or one.last_s > min(recent, self._answered_s)]
        return sorted(found, key=lambda one: one.since_s)


def aws_usd(kinds: Mapping[str, int | float]) -> float:
    """What requests of these kinds cost at AWS, in US dollars, storage and transfer aside."""
    writes, reads = (sum(kinds.get(kind, 0) for kind in of) for of in (WRITES, READS))
    return writes * AWS_USD_PER_WRITE + reads * AWS_USD_PER_READ


def _add(kinds: dict[str, RequestCount], kind: str, one: RequestCount) -> None:
    before = kinds.get(kind, RequestCount())
    kinds[kind] = RequestCount(*(a + b for a, b in zip(before, one, strict=True)))

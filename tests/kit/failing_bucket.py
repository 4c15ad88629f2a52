"""A bucket of which requests fail as a `Fault` says, or that is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast_files.objects.client import WriteOutcome
from holdfast_formats.errors import NoSpace, StorageFailed
from tests.suites.store_suite import Fault

_WRITES = ("put", "put_part", "copy", "begin_upload", "complete")
_LISTS = ("pages", "uploads", "parts")


class Switch:
    """What fails now, of all buckets that are behind it."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.is_full = False

    @contextmanager
    def failing(self, fault: Fault) -> Iterator[None]:
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None

    @contextmanager
    def full(self) -> Iterator[None]:
        self.is_full = True
        try:
            yield
        finally:
            self.is_full = False


class FailingBucket:
    """Each call is one request. What is sent once, a put with a condition and the completion of an upload, has an unknown
    outcome where its answer is lost; every second one that fails is lost on its way, which nothing tells from that.
    """

    def __init__(self, bucket: Any, switch: Switch) -> None:
        self._behind, self._switch = bucket, switch

    def using(self, **options: Any) -> FailingBucket:
        return FailingBucket(self._behind.using(**options), self._switch)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._behind, name)
        return self._failing(name, found) if callable(found) and name != "close" else found

    def _failing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def done(*arguments: Any, **options: Any) -> Any:
            found = call(*arguments, **options)
            return list(found) if name in _LISTS else found

        def act(*arguments: Any, **options: Any) -> Any:
            fault = self._switch.fault
            is_due = fault is not None and fault.due()
            if self._switch.is_full and name in _WRITES:
                raise NoSpace("the bucket is full")
            if fault is None or not is_due:
                return done(*arguments, **options)
            once = name == "complete" or options.get("if_absent") or options.get("if_match") is not None
            if fault.how == "answer lost":
                done(*arguments, **options)
            if once and (fault.how == "answer lost" or fault.at % 2):
                return WriteOutcome("unknown", detail=f"no answer to {name}")
            raise StorageFailed(f"{name} {'has no answer' if fault.how == 'answer lost' else 'fails'}")

        return act

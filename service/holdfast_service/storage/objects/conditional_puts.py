"""Writes one object on a condition, and settles what its answer leaves open by reading back (I14).

The bytes must tell their writer: an object with the same bytes counts as one's own. Where a bucket does not honour
conditions, an arbiter outside it lets one writer at a time through, and the condition is read. What such a bucket may carry
out late, after its answer was lost, is then not prevented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from holdfast_files.objects.client import Bucket, WriteOutcome
from holdfast_formats.errors import CheckpointError, InvalidRequest, NoSuchResource, StorageFailed
from holdfast_service.storage.store import Alone

from .probe import Honours, tagged

TRIES_MAX = 3


class Settled(NamedTuple):
    """The result of a conditional put: `exists` if its condition does not hold, `unknown` if that could not be found out."""

    outcome: Literal["done", "exists", "unknown"]
    detail: str = ""


class ConditionalPuts:
    """Conditional puts to one bucket. Stateless."""

    def __init__(self, bucket: Bucket, honours: Honours, alone: Alone | None = None) -> None:
        """`alone(name)` lets one writer of all nodes through at a time; `InvalidRequest` without it if the bucket does not
        arbitrate.
        """
        if not honours.arbitrates and alone is None:
            raise InvalidRequest(
                f"{bucket.label} cannot keep two writers apart: {honours.lacking}",
                hint="serve it with a catalog in PostgreSQL, which keeps them apart, or say that nothing else writes there",
            )
        self._bucket, self._honours, self._alone = bucket, honours, alone

    def first(self, key: str, data: bytes) -> Settled:
        """Write an object that does not exist yet."""
        if self._honours.if_absent == "honoured":
            return self._settled(key, data, None, lambda: self._bucket.put(key, data, if_absent=True))
        return self._one_by_one(key, data, None)

    def replace(self, key: str, data: bytes, etag: str) -> Settled:
        """Replace an object that still has this tag."""
        if self._honours.if_match == "honoured":
            match = tagged(etag, self._honours.quoted)
            return self._settled(key, data, etag, lambda: self._bucket.put(key, data, if_match=match))
        return self._one_by_one(key, data, etag)

    def _settled(self, key: str, data: bytes, etag: str | None, put: Callable[[], WriteOutcome]) -> Settled:
        detail = ""
        for _ in range(TRIES_MAX):
            written = put()
            if written.outcome == "done":
                return Settled("done")
            if written.outcome == "exists" and not detail:
                return Settled("exists")
            detail = written.detail or detail or "no answer"
            try:
                stands = self._stands(key, len(data))
            except CheckpointError as error:
                return Settled("unknown", f"{detail}; and it cannot be read back: {error.detail}")
            if stands is not None and stands[0] == data:
                return Settled("done")
            if (None if stands is None else stands[1]) != etag:
                return Settled("exists")
        return Settled("unknown", detail)  # a request may still be on its way

    def _one_by_one(self, key: str, data: bytes, etag: str | None) -> Settled:
        assert self._alone is not None
        with self._alone(key.partition("/")[0]):
            stands = self._stands(key, len(data))
            if (None if stands is None else stands[1]) != etag:
                return Settled("exists")
            try:
                self._bucket.put(key, data)
            except StorageFailed as error:
                lost = WriteOutcome("unknown", detail=error.detail)
                return self._settled(key, data, etag, lambda: lost)
        return Settled("done")

    def _stands(self, key: str, size: int) -> tuple[bytes | None, str] | None:
        """Bytes and tag of the object, None if there is none. Of one with another size, no bytes are read."""
        found = self._bucket.head(key)
        if found is None:
            return None
        if found.size != size:
            return None, found.etag
        try:
            return self._bucket.read_tagged(key, size)
        except NoSuchResource:
            return None

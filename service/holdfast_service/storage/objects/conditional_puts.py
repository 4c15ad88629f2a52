"""Writes one object on a condition, and settles what its answer leaves open by looking at the object (I14).

Each write has an id of its own, which is kept with the object: another's equal bytes are not taken for one's own. That
matters on servers that answer with 500 where writers meet, as radosgw does: two nodes that count from 5 to 6 would both
believe that they had. Where a bucket does not honour conditions, an arbiter outside it lets one writer at a time through,
and the condition is read: a lock within one process, and between nodes a row of their catalog (`put_intents.py`). What such
a bucket carries out late, after its answer was lost, is then not prevented.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from holdfast_files.objects.client import Bucket, WriteOutcome
from holdfast_files.objects.probe import Honours
from holdfast_formats.errors import CheckpointError, InvalidRequest, StorageFailed
from holdfast_service.storage.store import Alone

from . import put_intents
from .put_intents import PutIntent, PutIntents, Settled

TRIES_MAX = 8  # some ten seconds: a bucket that is asked too much says so for a while
PAUSE_FIRST_S = 0.2
PAUSE_MAX_S = 5.0


class ConditionalPuts:
    """Puts of control objects to one bucket. Stateless."""

    def __init__(
        self, bucket: Bucket, honours: Honours, alone: Alone | None = None, intents: PutIntents | None = None
    ) -> None:
        """If the bucket does not arbitrate, `alone(name)` lets one writer of this process through at a time, or `intents` do
        of all nodes; `InvalidRequest` without either.
        """
        if not honours.arbitrates and alone is None and intents is None:
            raise InvalidRequest(
                f"{bucket.label} cannot keep two writers apart: {honours.lacking}",
                hint="serve it with a catalog in PostgreSQL, which keeps them apart, or say that nothing else writes there",
            )
        self._bucket, self._honours, self._alone, self._intents = bucket, honours, alone, intents

    def first(self, key: str, data: bytes, retry_s: float | None = None) -> Settled:
        """Write an object that does not exist yet. With `retry_s`, what is safe to repeat is repeated for so long, where the
        bucket arbitrates: another arbiter waits for the usual time.
        """
        return self._put(key, data, None, retry_s)

    def replace(self, key: str, data: bytes, etag: str, retry_s: float | None = None) -> Settled:
        """Replace an object that still has this tag; `retry_s` as above."""
        return self._put(key, data, etag, retry_s)

    def always(self, key: str, data: bytes, retry_s: float) -> None:
        """Write an object that others would write alike, without a condition; it is tried for `retry_s`."""
        self._bucket.using(retry_s=retry_s).put(key, data)

    def settle(self, key: str) -> None:
        """Before an object is deleted: finish what another node has begun to put there; `StorageFailed` if it is unknown."""
        if self._intents is not None:
            put_intents.settle(self._bucket, self._intents, key)

    def _put(self, key: str, data: bytes, etag: str | None, retry_s: float | None) -> Settled:
        writer, condition = secrets.token_hex(8), self._honours.if_absent if etag is None else self._honours.if_match
        if condition == "honoured":
            bucket = self._bucket.using(retry_s=retry_s)
            return self._settled(
                _Wanted(key, etag, writer),
                lambda: bucket.put(key, data, if_absent=etag is None, if_match=etag, writer=writer),
            )
        if self._intents is not None:
            return put_intents.put(self._bucket, self._intents, key, PutIntent(data, etag, writer))
        assert self._alone is not None
        with self._alone(key.partition("/")[0]):
            found = self._bucket.head(key)
            if (None if found is None else found.etag) != etag:
                return Settled("exists")
            try:
                self._bucket.put(key, data, writer=writer)
            except StorageFailed as error:
                return self._looked(_Wanted(key, etag, writer), error.detail) or Settled("unknown", error.detail)
        return Settled("done")

    def _settled(self, wanted: _Wanted, put: Callable[[], WriteOutcome]) -> Settled:
        detail = ""
        for tries in range(TRIES_MAX):
            if tries:
                time.sleep(random.uniform(0, min(PAUSE_MAX_S, PAUSE_FIRST_S * 2**tries)))
            written = put()
            if written.outcome == "done":
                return Settled("done")
            if written.outcome == "exists" and not detail:
                return Settled("exists")
            detail = written.detail or detail or "no answer"
            found = self._looked(wanted, detail)
            if found is not None:
                return found
        return Settled("unknown", detail)  # a request may still be on its way

    def _looked(self, wanted: _Wanted, detail: str) -> Settled | None:
        """What became of a write, by the object; None if nothing has yet."""
        try:
            found = self._bucket.head(wanted.key)
        except CheckpointError as error:
            return Settled("unknown", f"{detail}; and it cannot be looked at: {error.detail}")
        if found is not None and found.writer == wanted.writer:
            return Settled("done")
        return None if (None if found is None else found.etag) == wanted.etag else Settled("exists")


class _Wanted(NamedTuple):
    """An object that is to be written, its tag before, None for no object, and the id of this one write."""

    key: str
    etag: str | None
    writer: str

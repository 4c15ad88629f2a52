"""Lets one of several nodes write an object, where the bucket honours no conditions: by a row of the catalog they share.

A writer first records what it will write and over which object: an intent, of which a key has at most one. Then it looks at
the object, writes, and removes the intent. A lock would not do: it can be lost while a request is on its way. An intent that
a dead writer has left is carried out by the next writer, so that the first one always wins. It waits for that until no
request of the dead writer can be on its way, unless the bucket carries one out even later: S3 has no remedy for that without
conditions.
"""

from __future__ import annotations

import random
import time
from typing import Literal, NamedTuple, Protocol

from holdfast_files.objects.client import Bucket
from holdfast_formats.errors import CatalogUnavailable, StorageFailed

LEFT_S = 60.0  # a put is given up after a quarter of a minute, and half a minute of silence
PAUSE_S = 0.2
DATA_BYTES_MAX = 2**16  # of an intent that another node can carry out


class PutIntent(NamedTuple):
    """A put that was begun: its bytes, the object's tag before, None for no object, and the id of this one write. Without
    `data`, because it is long, it is only awaited: such objects are of a round, of which all nodes write the same bytes.
    """

    data: bytes | None
    etag: str | None
    writer: str


class StandingIntent(NamedTuple):
    """An intent, and the seconds for which it has stood by the catalog's clock."""

    intent: PutIntent
    age_s: float


class PutIntents(Protocol):
    """The intents of all nodes, durable. All raise `CatalogUnavailable`."""

    def begin(self, key: str, intent: PutIntent) -> StandingIntent | None:
        """Record an intent; returns the one that stands, if there is one, and records nothing then."""

    def standing(self, key: str) -> StandingIntent | None:
        """The intent that stands, if there is one."""

    def end(self, key: str, writer: str) -> None:
        """Remove the intent of this write, if it stands."""


class Settled(NamedTuple):
    """The result of a conditional put: `exists` if its condition does not hold, `unknown` if that could not be found out."""

    outcome: Literal["done", "exists", "unknown"]
    detail: str = ""


def put(bucket: Bucket, intents: PutIntents, key: str, mine: PutIntent) -> Settled:
    """Put an object if it still has the tag of the intent, whatever other nodes do."""
    name = _name(bucket, key)
    kept = mine if mine.data is None or len(mine.data) <= DATA_BYTES_MAX else mine._replace(data=None)
    try:
        while (standing := intents.begin(name, kept)) is not None:
            left = _finished(bucket, intents, key, standing)
            if left.outcome == "unknown":
                return left
        done = _carried_out(bucket, key, mine)
        if done.outcome != "unknown":
            intents.end(name, mine.writer)
    except CatalogUnavailable as away:
        return Settled("unknown", f"the catalog decides who writes {key}: {away.detail}")
    return done


def settle(bucket: Bucket, intents: PutIntents, key: str) -> None:
    """Before an object is deleted: finish what another writer has begun there, which would else be done after the deletion.
    `StorageFailed` if that is not known to be done, `CatalogUnavailable`.
    """
    while (standing := intents.standing(_name(bucket, key))) is not None:
        left = _finished(bucket, intents, key, standing)
        if left.outcome == "unknown":
            raise StorageFailed(f"{key} is being written: {left.detail}", path=key)


def _finished(bucket: Bucket, intents: PutIntents, key: str, standing: StandingIntent) -> Settled:
    """Carry out the intent of a dead writer, or wait for a living one for a moment."""
    if standing.age_s < LEFT_S:
        time.sleep(random.uniform(0, PAUSE_S))
        return Settled("exists")
    done = _carried_out(bucket, key, standing.intent)
    if done.outcome != "unknown":
        intents.end(_name(bucket, key), standing.intent.writer)
    return done


def _name(bucket: Bucket, key: str) -> str:
    return f"{bucket.label}/{key}"


def _carried_out(bucket: Bucket, key: str, intent: PutIntent) -> Settled:
    found = bucket.head(key)
    if found is not None and found.writer == intent.writer:
        return Settled("done")
    if (None if found is None else found.etag) != intent.etag or intent.data is None:
        return Settled("exists")
    try:
        bucket.put(key, intent.data, writer=intent.writer)
    except StorageFailed as error:
        found = bucket.head(key)
        if found is None or found.writer != intent.writer:
            return Settled("unknown", error.detail)
    return Settled("done")

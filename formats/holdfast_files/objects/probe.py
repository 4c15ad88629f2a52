"""Finds out what a bucket honours before a root in it is served: conditions of writes, and reads after writes."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import Literal, NamedTuple

from holdfast_files.objects.checksums import Checksum
from holdfast_files.objects.client import Bucket
from holdfast_formats.errors import CheckpointError, StorageFailed

PROBES = ".holdfast.probe"
LEFT_S = 3600.0  # after which nothing goes on with what a probe has written: it was killed
_FIRST, _SECOND, _WRITER = b"first", b"second", "probe"

Condition = Literal["honoured", "refused", "ignored"]


class Honours(NamedTuple):
    """What a bucket honours of the conditions of puts, and the cheapest `checksum` of bodies that it checks."""

    if_absent: Condition
    if_match: Condition
    checksum: Checksum = "md5"

    @property
    def arbitrates(self) -> bool:
        """Whether of several writers the bucket lets one through, so that nothing else has to."""
        return self.if_absent == self.if_match == "honoured"

    @property
    def lacking(self) -> str:
        """What is missing for that, as messages say it; empty if nothing is."""
        names = {"If-None-Match": self.if_absent, "If-Match": self.if_match}
        return " and ".join(f"puts with {name} are {state}" for name, state in names.items() if state != "honoured")


HONOURED = Honours("honoured", "honoured")


def probe(bucket: Bucket) -> Honours:
    """Write, read and remove a few bytes at a new key. Raises `StorageFailed` for a bucket that says it stores what it does
    not, and what the client raises, such as for a missing permission.
    """
    _end_left(bucket)
    key = f"{PROBES}/{uuid.uuid4().hex}"
    if bucket.head(key) is not None:
        raise _lies(bucket, "an object that was never written exists")
    bucket.put(key, _FIRST, writer=_WRITER)
    try:
        if bucket.read(key) != _FIRST:
            raise _lies(bucket, "an object does not have the bytes that were written")
        found = bucket.head(key)
        if found is None or found.writer != _WRITER:
            raise _lies(bucket, "an object does not keep its metadata")
        if_absent = _asked(bucket, key, if_absent=True)
        if_match = _if_match(bucket, key)
        checksum: Checksum = "crc32" if bucket.checks_crc32(key) else "md5"
    finally:
        bucket.delete([key])
    if bucket.head(key) is not None:
        raise _lies(bucket, "an object exists after it was deleted")
    return Honours(if_absent, if_match, checksum)


def _end_left(bucket: Bucket) -> None:
    """Remove what probes have left that were killed. Ages are differences of the store's own times (I17)."""
    now = 0.0
    for page in bucket.pages(f"{PROBES}/"):
        now, left = page.now, [one.key for one in page.objects if page.now - one.modified >= LEFT_S]
        if left:
            bucket.delete(left)
    with suppress(CheckpointError):  # such as without the permission to list them
        for one in bucket.uploads(f"{PROBES}/"):
            if now - one.begun >= LEFT_S:
                bucket.abort(one.key, one.id)


def _if_match(bucket: Bucket, key: str) -> Condition:
    found = _asked(bucket, key, if_match='"0123456789abcdef0123456789abcdef"')
    if found != "honoured":
        return found
    etag = bucket.read_tagged(key, len(_FIRST))[1]
    holds = bucket.put(key, _SECOND, if_match=etag).outcome == "done" and bucket.read(key) == _SECOND
    return "honoured" if holds else "refused"


def _asked(bucket: Bucket, key: str, *, if_absent: bool = False, if_match: str | None = None) -> Condition:
    """Put with a condition that does not hold."""
    try:
        outcome = bucket.put(key, _SECOND, if_absent=if_absent, if_match=if_match).outcome
    except CheckpointError as error:
        if str(error.members.get("answer", "")).startswith(("400", "405", "501")):
            return "refused"
        raise
    if outcome == "exists" and bucket.read(key) == _FIRST:
        return "honoured"
    bucket.put(key, _FIRST)
    return "ignored"


def _lies(bucket: Bucket, what: str) -> StorageFailed:
    return StorageFailed(
        f"{bucket.label} cannot be a root: {what}", hint="use a bucket that keeps what is written, and shows it at once"
    )

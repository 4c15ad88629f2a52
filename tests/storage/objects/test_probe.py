"""What a bucket honours is found out before it is used, on servers, and on buckets that behave as some do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from holdfast_files.objects.checksums import Checksum
from holdfast_files.objects.client import Found, WriteOutcome
from holdfast_files.objects.probe import LEFT_S, PROBES
from holdfast_formats.errors import CheckpointError, InvalidRequest, StorageFailed
from holdfast_service.storage.objects import HONOURED, ConditionalPuts, Honours, probe
from tests.kit.memory_bucket import MemoryBucket
from tests.kit.objects import TestBucket
from tests.kit.objects_proxy import ACCESS_DENIED, Answer, faulty
from tests.storage.objects import reaching


class ChangedPuts(MemoryBucket):
    """Puts go by way of a function."""

    def __init__(self, put: Callable[..., WriteOutcome]) -> None:
        super().__init__()
        self._put = put

    def put(self, key: str, data: Any, **how: Any) -> WriteOutcome:
        put = partial(super().put, writer=how.get("writer", ""))
        return self._put(put, key, data, how.get("if_absent", False), how.get("if_match"))


def ignoring_match(put: Any, key: str, data: Any, if_absent: bool, if_match: str | None) -> WriteOutcome:
    found: WriteOutcome = put(key, data, if_absent=if_absent)
    return found


def refusing(put: Any, key: str, data: Any, if_absent: bool, if_match: str | None) -> WriteOutcome:
    if if_absent or if_match:
        raise StorageFailed(
            "A header you provided implies functionality that is not implemented", answer="501 NotImplemented"
        )
    found: WriteOutcome = put(key, data)
    return found


def never_holding(put: Any, key: str, data: Any, if_absent: bool, if_match: str | None) -> WriteOutcome:
    if if_match:
        return WriteOutcome("exists")
    found: WriteOutcome = put(key, data, if_absent=if_absent)
    return found


def saying_exists(put: Any, key: str, data: Any, if_absent: bool, if_match: str | None) -> WriteOutcome:
    """The condition is answered rightly, and the object is overwritten all the same."""
    found: WriteOutcome = put(key, data)
    return WriteOutcome("exists") if if_absent or if_match else found


@pytest.mark.parametrize(
    ("bucket", "expected"),
    [
        (MemoryBucket(), HONOURED),
        (MemoryBucket(conditions=False), Honours("ignored", "ignored")),
        (ChangedPuts(ignoring_match), Honours("honoured", "ignored")),
        (ChangedPuts(refusing), Honours("refused", "refused")),
        (ChangedPuts(never_holding), Honours("honoured", "refused")),
        (ChangedPuts(saying_exists), Honours("ignored", "ignored")),
    ],
    ids=["all", "ignores", "ignores If-Match", "refuses", "no tag is right", "says one thing"],
)
def test_conditions(bucket: MemoryBucket, expected: Honours) -> None:
    """Honoured, refused, or accepted and ignored; nothing is left."""
    assert probe(bucket) == expected
    assert bucket.names() == []
    assert expected.arbitrates == (expected.lacking == "")


def test_a_bucket_that_does_not_arbitrate_needs_an_arbiter() -> None:
    """The store does not pretend; what is missing is said."""
    with pytest.raises(InvalidRequest, match="If-None-Match are ignored and puts with If-Match are refused"):
        ConditionalPuts(MemoryBucket(), Honours("ignored", "refused"))


class SaysYes(MemoryBucket):
    """It answers every request as if it had been done."""

    def head(self, key: str) -> Found | None:
        return Found(5, "x", 0.0, 0.0)


class Forgets(MemoryBucket):
    """What is written is not there afterwards."""

    def put(self, key: str, data: Any, **how: Any) -> WriteOutcome:
        return WriteOutcome("done", "x")


class Keeps(MemoryBucket):
    """Deletions are answered and not done."""

    def delete(self, keys: Any) -> None:
        pass


class Stale(MemoryBucket):
    """It has other bytes than were written."""

    def read(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        return b"older"


class WithoutMetadata(MemoryBucket):
    """It drops what a lost write is known by."""

    def put(self, key: str, data: Any, **how: Any) -> WriteOutcome:
        return super().put(key, data, **{**how, "writer": ""})


@pytest.mark.parametrize("kind", [SaysYes, Forgets, Keeps, Stale, WithoutMetadata])
def test_a_bucket_that_says_what_is_not_so(kind: type[MemoryBucket]) -> None:
    """It cannot be a root, and is refused."""
    with pytest.raises(CheckpointError) as caught:
        probe(kind())
    assert kind is Forgets or "cannot be a root" in caught.value.detail


def test_a_bucket_that_may_not_be_written() -> None:
    """The reason is the client's, which names the permission."""

    def forbidden(*_: Any) -> WriteOutcome:
        raise StorageFailed("access denied", answer="403 AccessDenied")

    with pytest.raises(StorageFailed, match="access denied"):
        probe(ChangedPuts(forbidden))


def test_servers(bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these arbitrate."""
    with reaching.opened(bucket, monkeypatch) as opened:
        checksum: Checksum = "crc32" if bucket.server.kind == "seaweedfs" else "md5"
        assert probe(opened) == HONOURED._replace(checksum=checksum)
    assert bucket.sizes() == {}


def test_a_server_that_wants_all_sums_once_more(seaweedfs_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks the CRC32 of parts, and then puts none of them together: MD5 is used, and no upload is left."""
    with faulty(seaweedfs_bucket.server.endpoint) as proxy:
        refused = proxy.on(Answer(400, "InvalidPart"), "complete")
        with reaching.opened(seaweedfs_bucket, monkeypatch, proxy.endpoint) as opened:
            assert probe(opened).checksum == "md5" and refused.hits == 1
    assert seaweedfs_bucket.sizes() == {} and seaweedfs_bucket.uploads() == []


def test_what_a_killed_probe_has_left(seaweedfs_bucket: TestBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next probe ends it when it is an hour old, by the server's clock; a probe that goes on is left alone."""
    with (
        faulty(seaweedfs_bucket.server.endpoint) as proxy,
        reaching.opened(seaweedfs_bucket, monkeypatch, proxy.endpoint) as opened,
    ):
        opened.put(f"{PROBES}/left", b"first")
        opened.begin_upload(f"{PROBES}/left")
        opened.put("foreign", b"object")
        probe(opened)
        assert len(seaweedfs_bucket.sizes()) == 2 and len(seaweedfs_bucket.uploads()) == 1
        proxy.skew_s = LEFT_S + 60.0
        proxy.on(ACCESS_DENIED, "uploads")
        probe(opened)
        assert [*seaweedfs_bucket.sizes()] == ["foreign"] and len(seaweedfs_bucket.uploads()) == 1
        probe(opened)
    assert [*seaweedfs_bucket.sizes()] == ["foreign"] and seaweedfs_bucket.uploads() == []

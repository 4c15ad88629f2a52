"""Requests to a bucket, on each server: what each does, and what its answer is as a value."""

from __future__ import annotations

import base64
import urllib.request

import pytest

from holdfast_files.objects import checksums, client
from holdfast_files.objects.checksums import Checksum
from holdfast_files.objects.client import Bucket
from holdfast_files.objects.traffic import RequestCount, Traffic
from holdfast_formats.errors import LimitExceeded, NoSuchResource, StorageFailed
from holdfast_service.storage.objects.unfinished_uploads import has_bytes
from tests.kit.objects import BucketServer, TestBucket

ODD = "run-1_a.B/commits/step-0000000005@3~x"


def test_what_was_put_is_read(bucket: Bucket) -> None:
    """Whole, by range, into memory, with its tag; past its end there are no bytes."""
    written = bucket.put(ODD, b"0123456789")
    assert written.outcome == "done" and written.etag
    assert bucket.read(ODD) == b"0123456789"
    assert bucket.read(ODD, 3) == b"3456789"
    assert bucket.read(ODD, 3, 4) == b"3456"
    assert bucket.read(ODD, 8, 100) == b"89"
    assert bucket.read(ODD, 10, 5) == bucket.read(ODD, 0, 0) == b""
    into = bytearray(b"-" * 6)
    assert bucket.read_into(ODD, 7, into) == 3 and into == b"789---"
    assert bucket.read_into(ODD, 2, into) == 6 and into == b"234567"
    assert bucket.read_tagged(ODD, 10) == (b"0123456789", written.etag)
    found = bucket.head(ODD)
    assert found is not None and (found.size, found.etag) == (10, written.etag)
    assert 0 <= found.now - found.modified < 3600


def test_an_empty_object(bucket: Bucket) -> None:
    """It exists, and has no bytes."""
    bucket.put("empty", b"")
    found = bucket.head("empty")
    assert found is not None and found.size == 0
    assert bucket.read("empty") == bucket.read("empty", 0, 10) == b"" and bucket.read_tagged("empty", 5)[0] == b""
    assert bucket.read_into("empty", 0, bytearray(3)) == 0


def test_what_is_not_there(bucket: Bucket) -> None:
    """An absent object is None or `NoSuchResource`, and is deleted without complaint."""
    assert bucket.head("absent") is None
    for ask in (lambda: bucket.read("absent"), lambda: bucket.read_tagged("absent", 5)):
        with pytest.raises(NoSuchResource):
            ask()
    with pytest.raises(NoSuchResource):
        bucket.read_into("absent", 0, bytearray(3))
    bucket.delete(["absent"])
    bucket.delete(["absent", "also-absent"])


def test_an_absent_bucket_is_no_absent_object(bucket_server: BucketServer, s3_settings: pytest.MonkeyPatch) -> None:
    """Otherwise all that it held would be taken for removed."""
    s3_settings.setenv("AWS_ENDPOINT_URL_S3", bucket_server.endpoint)
    gone = client.opened("s3://no-such-bucket/p")
    for ask in (lambda: gone.head("key"), lambda: gone.read("key"), lambda: list(gone.pages(""))):
        with pytest.raises(StorageFailed, match="there is no bucket no-such-bucket") as refused:
            ask()
        assert refused.value.members["answer"] == "404 NoSuchBucket"
    gone.close()


def test_conditions(bucket: Bucket) -> None:
    """A put is refused where there is an object already, or another than the tag says."""
    first = bucket.put("key", b"1", if_absent=True)
    assert first.outcome == "done"
    assert bucket.put("key", b"2", if_absent=True).outcome == "exists"
    second = bucket.put("key", b"3", if_match=first.etag)
    assert second.outcome == "done"
    assert bucket.put("key", b"4", if_match=first.etag).outcome == "exists"
    assert bucket.put("absent", b"4", if_match=first.etag).outcome == "exists"
    assert bucket.read_tagged("key", 1) == (b"3", second.etag)


def test_more_than_is_wanted_is_not_read(bucket: Bucket) -> None:
    """The length that the answer states is enough to refuse it."""
    bucket.put("long", bytes(1000))
    traffic = Traffic()
    with pytest.raises(LimitExceeded):
        bucket.using(traffic=traffic).read_tagged("long", 999)
    assert bucket.read_tagged("long", 1000)[0] == bytes(1000)
    assert traffic.by_kind()["get"].sent == 1


def test_lists(bucket: Bucket) -> None:
    """In order, by pages, after a key, and up to a delimiter; keys of other prefixes are not among them."""
    for number in range(3):
        bucket.put(f"run/commits/step-{number}", bytes(number))
    bucket.put("run/run.json", b"{}")
    bucket.put("runs-other", b"")
    (page,) = bucket.pages("run/")
    assert [(one.key, one.size) for one in page.objects] == [
        ("run/commits/step-0", 0),
        ("run/commits/step-1", 1),
        ("run/commits/step-2", 2),
        ("run/run.json", 2),
    ]
    assert all(page.now - one.modified < 3600 for one in page.objects)
    (page,) = bucket.pages("run/", delimiter="/")
    assert ([one.key for one in page.objects], page.prefixes) == (["run/run.json"], ["run/commits/"])
    (page,) = bucket.pages("run/commits/", after="run/commits/step-1")
    assert [one.key for one in page.objects] == ["run/commits/step-2"]
    (page,) = bucket.pages("none/")
    assert not page.objects


def test_a_list_of_many_pages(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each object once, at most so many a page."""
    monkeypatch.setattr(client, "KEYS_MAX", 10)
    keys = [f"k/{number:04}" for number in range(23)]
    for key in keys:
        bucket.put(key, b"")
    pages = list(bucket.pages("k/"))
    assert [len(page.objects) for page in pages] == [10, 10, 3]
    assert [one.key for page in pages for one in page.objects] == keys
    bucket.delete(keys)
    assert [page.objects for page in bucket.pages("k/")] == [[]]


def test_an_object_of_parts(bucket: Bucket) -> None:
    """Parts are put in any order, out of several pieces of memory; the object is there once they are completed."""
    upload = bucket.begin_upload("big")
    first, second = bytes(5 * 2**20), b"end"
    tags = {2: bucket.put_part("big", upload, 2, [memoryview(second)])}
    tags[1] = bucket.put_part("big", upload, 1, [memoryview(first)[:100], memoryview(first)[100:]])
    assert bucket.head("big") is None
    written = bucket.complete("big", upload, [(number, tags[number]) for number in (2, 1)])
    assert written.outcome == "done"
    assert bucket.read("big") == first + second
    found = bucket.head("big")
    assert found is not None and found.size == len(first + second) and written.etag in ("", found.etag)  # radosgw says none


def test_an_upload_that_is_given_up(bucket: Bucket) -> None:
    """Completing it is not known to have been done, and giving it up again is fine."""
    upload = bucket.begin_upload("big")
    bucket.abort("big", upload)
    bucket.abort("big", upload)
    assert bucket.complete("big", upload, [(1, '"0"')]).outcome == "unknown"


def test_requests_are_counted(bucket: Bucket) -> None:
    """By kind, with the bytes of their bodies."""
    traffic = Traffic()
    counted = bucket.using(traffic=traffic)
    counted.put("key", bytes(10))
    counted.read("key")
    counted.read("key", 5)
    assert traffic.by_kind() == {"put": RequestCount(1, 0, 10, 0), "get": RequestCount(2, 0, 0, 15)}


def test_copies(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the server, whole or by parts; a source that is not there is named."""
    data = bytes(range(256)) * 2**12 * 11  # over two parts of the least size that servers take
    bucket.put(ODD, data)
    bucket.copy(ODD, "whole", len(data))
    assert bucket.read("whole") == data
    monkeypatch.setattr(client, "COPY_BYTES_MAX", 5 * 2**20)
    monkeypatch.setattr(client, "COPY_PART_BYTES", 5 * 2**20)
    traffic = Traffic()
    bucket.using(traffic=traffic).copy(ODD, "parts", len(data))
    assert bucket.read("parts") == data
    assert traffic.by_kind()["copy"].sent == 3
    with pytest.raises(NoSuchResource):
        bucket.copy("absent", "copied", 10)
    assert bucket.head("copied") is None
    assert not list(bucket.uploads(""))


def test_uploads_that_were_begun(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are listed by prefix and over several pages until they are completed or given up."""
    monkeypatch.setattr(client, "KEYS_MAX", 2)
    begun = {(key, bucket.begin_upload(key)) for key in ("run/a", "run/b", "run/c@1", "run/d", "run/e", "other")}
    assert {(one.key, one.id) for one in bucket.uploads("")} == begun
    assert {(one.key, one.id) for one in bucket.uploads("run/")} == {one for one in begun if one[0] != "other"}
    assert all(one.begun > 0 for one in bucket.uploads(""))
    for key, upload in begun:
        bucket.abort(key, upload)
    assert not list(bucket.uploads(""))


def test_parts_that_have_arrived(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are listed over several pages, with sizes and with tags that are those of their bytes, until it is given up."""
    monkeypatch.setattr(client, "KEYS_MAX", 2)
    upload, sent = bucket.begin_upload(ODD), {number: bytes([number]) * (10 + number) for number in (1, 3, 4, 7, 9)}
    assert not list(bucket.parts(ODD, upload))
    tags = {number: bucket.put_part(ODD, upload, number, [memoryview(data)]) for number, data in sent.items()}
    found = {one.number: one for one in bucket.parts(ODD, upload)}
    assert {number: (one.size, one.etag) for number, one in found.items()} == {
        number: (len(data), tags[number]) for number, data in sent.items()
    }
    assert all(has_bytes(found[number], memoryview(data)) for number, data in sent.items())
    assert not has_bytes(found[1], memoryview(bytes(len(sent[1])))) and not has_bytes(found[1], memoryview(b"1"))
    bucket.abort(ODD, upload)
    with pytest.raises(NoSuchResource):
        list(bucket.parts(ODD, upload))


def test_a_link_to_read_by(bucket: Bucket) -> None:
    """Anybody can read the object by it, and a range of it."""
    bucket.put(ODD, b"0123456789")
    link = bucket.presign(ODD, 60)
    with urllib.request.urlopen(link) as answer:
        assert answer.read() == b"0123456789"
    with urllib.request.urlopen(urllib.request.Request(link, headers={"Range": "bytes=2-4"})) as answer:
        assert answer.read() == b"234"


@pytest.mark.parametrize("checksum", ["md5", "crc32", "none"])
def test_checksums(bucket: Bucket, checksum: Checksum) -> None:
    """Objects and parts are stored with each kind of checksum."""
    checked = bucket.using(checksum=checksum)
    checked.put("key", b"bytes")
    upload = checked.begin_upload("big")
    parts = [(number, checked.put_part("big", upload, number, [memoryview(bytes(5 * 2**20))])) for number in (1, 2)]
    assert checked.complete("big", upload, parts).outcome == "done"
    assert bucket.read("key") == b"bytes" and bucket.read("big") == bytes(10 * 2**20)


def test_bytes_that_change_on_their_way(
    bucket: Bucket, bucket_server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses them, by the checksum that all servers know."""
    if bucket_server.kind == "moto":
        pytest.skip("moto checks no checksum")
    upload = bucket.begin_upload("big")
    monkeypatch.setattr(checksums, "md5", lambda views: base64.b64encode(bytes(16)).decode())
    for ask in (
        lambda: bucket.put("key", b"bytes"),
        lambda: bucket.put_part("big", upload, 1, [memoryview(b"bytes")]),
    ):
        with pytest.raises(StorageFailed, match="400 BadDigest"):
            ask()
    assert bucket.head("key") is None


def test_whether_crc32_is_checked(bucket: Bucket, bucket_server: BucketServer) -> None:
    """By a part with a wrong one: radosgw 16 and moto take it. Then right ones are put together."""
    is_checked = bucket_server.kind == "seaweedfs"
    assert bucket.checks_crc32("probe") == is_checked
    assert (bucket.head("probe") is not None) == is_checked and not list(bucket.uploads(""))


def test_it_sees_what_others_store(bucket: Bucket, stored: TestBucket) -> None:
    """And others see what it stores, by the same keys."""
    stored.put(f"team/checkpoints/{ODD}", b"theirs")
    assert bucket.read(ODD) == b"theirs"
    (page,) = bucket.pages("")
    assert [(one.key, one.size) for one in page.objects] == [(ODD, 6)]
    bucket.put("own", b"own")
    assert stored.sizes() == {f"team/checkpoints/{ODD}": 6, "team/checkpoints/own": 3}

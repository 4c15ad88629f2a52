"""Answers that fail, end early or never come: what is repeated, what is not known, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from holdfast_files.objects import client, sending
from holdfast_files.objects.client import Bucket
from holdfast_files.objects.traffic import Traffic
from holdfast_formats.errors import LimitExceeded, NoSpace, NoSuchResource, StorageFailed
from tests.files.objects.scripted import Said, ScriptedServer, answer, refused, scripted

ETAG = 'ETag: "tag"\r\nLast-Modified: Sun, 29 Nov 2026 20:00:00 GMT\r\n'
DONE = Said(answer(200, headers=ETAG))
READ = Said(answer(200, b"0123456789", ETAG))
SLOW_DOWN, INTERNAL = refused(503, "SlowDown"), refused(500, "InternalError")
CUT_HEAD, RESET, CLOSED = Said(b"HTTP/1.1 200 O", "close"), Said(then="reset"), Said(then="close")
CUT_BODY = Said(answer(200, b"01234", ETAG, length=10), "close")
PASSING = {
    "503": SLOW_DOWN,
    "500": INTERNAL,
    "500 of a gateway": Said(answer(502, b"<html>Bad gateway</html>")),
    "429": refused(429, "TooManyRequests"),
    "400 RequestTimeout": refused(400, "RequestTimeout"),
    "reset": RESET,
    "closed": CLOSED,
    "cut head": CUT_HEAD,
}


_opened: list[Bucket] = []


@pytest.fixture(autouse=True)
def all_closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def _bucket(server: ScriptedServer, s3_settings: pytest.MonkeyPatch, retry_s: float = 60.0) -> Bucket:
    s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
    s3_settings.setattr(sending, "PAUSE_MAX_S", 0.01)
    _opened.append(client.opened("s3://bucket/p").using(retry_s=retry_s))
    return _opened[-1]


@pytest.mark.parametrize("passing", PASSING.values(), ids=PASSING)
def test_what_passes_is_tried_again(passing: Said, s3_settings: pytest.MonkeyPatch) -> None:
    """A read and a plain put go on after it, and count that they did."""
    traffic = Traffic()
    with scripted(passing, passing, READ, passing, DONE) as server:
        bucket = _bucket(server, s3_settings).using(traffic=traffic)
        assert bucket.read("key") == b"0123456789"
        assert bucket.put("key", b"bytes").outcome == "done"
    counts = traffic.by_kind()
    assert (counts["get"].sent, counts["get"].retries) == (3, 2)
    assert (counts["put"].sent, counts["put"].retries, counts["put"].sent_bytes) == (2, 1, 10)
    assert [one.body for one in server.requests if one.line.startswith("PUT")] == [b"bytes"] * 2


def test_a_body_that_is_cut_is_read_again(s3_settings: pytest.MonkeyPatch) -> None:
    """Half a body is no object: neither as bytes nor in the caller's memory."""
    with scripted(CUT_BODY, READ, CUT_BODY, READ, CUT_BODY, READ) as server:
        bucket = _bucket(server, s3_settings)
        assert bucket.read("key") == b"0123456789"
        into = bytearray(10)
        assert bucket.read_into("key", 0, into) == 10 and into == b"0123456789"
        assert bucket.read_tagged("key", 100)[0] == b"0123456789"


def test_patience_ends(s3_settings: pytest.MonkeyPatch) -> None:
    """The error says what the last answer was."""
    with scripted(SLOW_DOWN) as server, pytest.raises(StorageFailed) as failed:
        _bucket(server, s3_settings, retry_s=0.2).read("key")
    assert failed.value.members["answer"] == "503 SlowDown" and "more requests than it takes" in failed.value.hint
    assert len(server.requests) > 1


ENDED = {
    "denied": refused(403, "AccessDenied"),
    "another secret": refused(403, "SignatureDoesNotMatch"),
    "quota": refused(403, "QuotaExceeded"),
    "disk": Said(answer(507)),
}


@pytest.mark.parametrize("said", ENDED.values(), ids=ENDED)
def test_what_was_allowed_before_is_waited_for(said: Said, s3_settings: pytest.MonkeyPatch) -> None:
    """A permission, keys or room that end in a save: what lacks them is sent again, and then refused by its name."""
    with scripted(DONE, said, said, DONE, said, said, DONE, said) as server:
        bucket = _bucket(server, s3_settings).using(traffic=Traffic())
        bucket.put("key", b"1")
        assert bucket.put("key", b"2").outcome == bucket.put("key", b"3", if_absent=True).outcome == "done"
        with pytest.raises((NoSpace, StorageFailed), match="fails put requests since") as failed:
            bucket.using(retry_s=0.2).put("key", b"4")
    assert failed.value.members["answer"].split()[0] in ("403", "507") and failed.value.hint
    assert len(server.requests) > 8


@pytest.mark.parametrize("said", ENDED.values(), ids=ENDED)
def test_what_was_never_allowed_is_refused_at_once(said: Said, s3_settings: pytest.MonkeyPatch) -> None:
    """As by a start with wrong keys, or with keys that may only read; and a reader is refused at once at any time."""
    with scripted(said, READ, said) as server:
        bucket = _bucket(server, s3_settings)
        for ask in (lambda: bucket.put("key", b"1"), lambda: bucket.read("key"), lambda: bucket.put("key", b"1")):
            with suppress(NoSpace, StorageFailed):
                ask()
        with pytest.raises((NoSpace, StorageFailed)):
            bucket.read("key")
    assert len(server.requests) == 4


def test_closing_ends_the_wait(s3_settings: pytest.MonkeyPatch) -> None:
    """A daemon that ends does not wait for a bucket that is away."""
    with scripted(SLOW_DOWN) as server:
        bucket = _bucket(server, s3_settings, retry_s=3600.0)
        s3_settings.setattr(sending, "PAUSE_MAX_S", 3600.0)
        failures: list[Exception] = []
        waiting = threading.Thread(target=lambda: failures.append(_raised(lambda: bucket.read("key"))))
        waiting.start()
        while not server.requests:
            time.sleep(0.01)
        bucket.close()
        waiting.join(180)
    assert isinstance(failures[0], StorageFailed)


def _raised(ask: Callable[[], Any]) -> Exception:
    with pytest.raises(StorageFailed) as failed:
        ask()
    return failed.value


UNKNOWN = {
    "409": refused(409, "ConditionalRequestConflict"),
    "500": INTERNAL,
    "503": SLOW_DOWN,
    "504": Said(answer(504)),
    "reset": RESET,
    "closed": CLOSED,
    "cut head": CUT_HEAD,
    "no tag": Said(answer(200, b"<html>Welcome</html>")),
}


@pytest.mark.parametrize("said", UNKNOWN.values(), ids=UNKNOWN)
def test_a_conditional_put_is_sent_once(said: Said, s3_settings: pytest.MonkeyPatch) -> None:
    """Whatever leaves open whether it was done is "unknown": a second try would meet its own object."""
    with scripted(said) as server:
        bucket = _bucket(server, s3_settings)
        for written in (bucket.put("key", b"1", if_absent=True), bucket.put("key", b"1", if_match='"tag"')):
            assert written.outcome == "unknown" and written.detail
    assert [one.headers.get("if-none-match") for one in server.requests] == ["*", None]


def test_a_conditional_put_that_never_went_out_is_sent_again(s3_settings: pytest.MonkeyPatch) -> None:
    """A connection that the server closed meanwhile, and a refused one, have done nothing."""
    with scripted(Said(DONE.data, "close"), DONE) as server:
        bucket = _bucket(server, s3_settings)
        assert bucket.put("key", b"1").outcome == "done"
        while not server.ended:
            time.sleep(0.01)
        assert bucket.put("key", b"2", if_absent=True).outcome == "done"
        assert server.connections == 2


@pytest.mark.parametrize("status", [412, 404])
def test_a_condition_that_does_not_hold(status: int, s3_settings: pytest.MonkeyPatch) -> None:
    """An object that is gone matches no tag."""
    said = refused(status, "PreconditionFailed" if status == 412 else "NoSuchKey")
    with scripted(said, Said(answer(404)), refused(404, "NoSuchKey")) as server:
        bucket = _bucket(server, s3_settings)
        assert bucket.put("key", b"1", if_match='"tag"').outcome == "exists"


def test_conditions_that_a_server_lacks(s3_settings: pytest.MonkeyPatch) -> None:
    """501 is neither done nor unknown: the error has it as its answer."""
    with scripted(refused(501, "NotImplemented")) as server:
        bucket = _bucket(server, s3_settings)
        with pytest.raises(StorageFailed) as failed:
            bucket.put("key", b"1", if_absent=True)
    assert failed.value.members["answer"] == "501 NotImplemented"


STRANGE = {
    "a page of a portal": Said(answer(200, b"<html><body>Log in</body></html>")),
    "no XML": Said(answer(200, b"\x00\xff" * 20)),
    "another kind of XML": Said(answer(200, b"<Other/>")),
    "cut XML": Said(answer(200, b"<ListBucketResult><Contents>")),
    "a wrong number": Said(
        answer(200, b"<ListBucketResult><Contents><Key>p/k</Key><Size>x</Size></Contents></ListBucketResult>")
    ),
    "a key of elsewhere": Said(
        answer(
            200,
            b"<ListBucketResult><Contents><Key>q/k</Key><Size>1</Size><LastModified>2026-11-29T21:00:00Z</LastModified>"
            b"</Contents></ListBucketResult>",
        )
    ),
    "entities that expand": Said(
        answer(200, b'<!DOCTYPE l [<!ENTITY a "aaaaaaaa"><!ENTITY b "&a;&a;&a;">]><ListBucketResult>&b;</ListBucketResult>')
    ),
    "entities in other letters": Said(
        answer(
            200,
            '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE l [<!ENTITY a "a">]><ListBucketResult/>'.encode("utf-16"),
        )
    ),
    "more than can be": Said(answer(200, headers="", length=2**40), "stall"),
    "a list without end": Said(
        answer(
            200,
            b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>",
        )
    ),
}


@pytest.mark.parametrize("said", STRANGE.values(), ids=STRANGE)
def test_lists_that_no_server_gives(said: Said, s3_settings: pytest.MonkeyPatch) -> None:
    """Are refused by name, once, and are not taken for an empty list."""
    with scripted(said) as server:
        bucket = _bucket(server, s3_settings)
        with pytest.raises(StorageFailed, match="a strange answer to list"):
            list(bucket.pages(""))
    assert len(server.requests) <= 2


def test_objects_that_no_server_gives(s3_settings: pytest.MonkeyPatch) -> None:
    """Another range than was asked for, all for a range, no tag: none of it is handed over."""
    other = Said(answer(206, b"01", f"{ETAG}Content-Range: bytes 5-6/10\r\n"))
    fewer = Said(answer(206, b"3", f"{ETAG}Content-Range: bytes 3-3/10\r\n"))
    unread = Said(answer(206, b"34", ETAG))
    for said in (other, fewer, unread, READ):
        with scripted(said) as server:
            bucket = _bucket(server, s3_settings)
            with pytest.raises(StorageFailed, match="strange"):
                bucket.read("key", 3, 2)
            with pytest.raises(StorageFailed, match="strange"):
                bucket.read_into("key", 3, bytearray(2))
    with scripted(Said(answer(200, b"<html>Welcome</html>"))) as server:
        bucket = _bucket(server, s3_settings)
        for ask in (lambda: bucket.read("key"), lambda: bucket.head("key"), lambda: bucket.put("key", b"")):
            with pytest.raises(StorageFailed, match="strange"):
                ask()
    with scripted(Said(answer(404, b"<html>Not found</html>"))) as server:
        bucket = _bucket(server, s3_settings)
        with pytest.raises(StorageFailed):  # and not that the object is not there
            bucket.read("key")


def test_a_length_of_gigabytes_is_refused_unread(s3_settings: pytest.MonkeyPatch) -> None:
    """The connection is given up: its bytes would be in the way of the next answer."""
    with scripted(Said(answer(200, b"{", ETAG, length=5 * 10**9), "stall"), READ) as server:
        bucket = _bucket(server, s3_settings)
        with pytest.raises(LimitExceeded, match="over 4096 bytes"):
            bucket.read_tagged("key", 4096)
        assert bucket.read("key") == b"0123456789"
        assert server.connections == 2


LATE_ERROR = Said(answer(200, b"<?xml version='1.0'?>\n \n<Error><Code>InternalError</Code></Error>"))
LATE_REFUSAL = Said(answer(200, b"<Error><Code>InvalidPart</Code><Message>One of the parts is gone.</Message></Error>"))
COMPLETED = Said(answer(200, b'<CompleteMultipartUploadResult><ETag>"t-1"</ETag></CompleteMultipartUploadResult>'))


def test_completions(s3_settings: pytest.MonkeyPatch) -> None:
    """An answer that began with 200 may yet say that it failed; what is doubtful is unknown, what is refused is an error."""
    gone = refused(404, "NoSuchUpload")
    with scripted(LATE_ERROR, INTERNAL, RESET, gone, COMPLETED, LATE_REFUSAL) as server:
        bucket = _bucket(server, s3_settings)
        outcomes = [bucket.complete("key", "u", [(2, '"b"'), (1, '"a"')]) for _ in range(5)]
        assert [one.outcome for one in outcomes] == ["unknown"] * 4 + ["done"]
        with pytest.raises(StorageFailed, match="200 InvalidPart to complete: One of the parts is gone"):
            bucket.complete("key", "u", [(1, '"a"')])
    assert b'<PartNumber>1</PartNumber><ETag>"a"</ETag></Part><Part><PartNumber>2<' in server.requests[0].body


def test_copies_that_fail_late(s3_settings: pytest.MonkeyPatch) -> None:
    """A copy is done only when its answer says so; one that failed in passing is asked for again."""
    done = Said(answer(200, b'<CopyObjectResult><ETag>"t"</ETag></CopyObjectResult>'))
    with scripted(LATE_ERROR, done, LATE_REFUSAL) as server:
        bucket = _bucket(server, s3_settings)
        bucket.copy("source", "key", 10)
        with pytest.raises(StorageFailed, match="InvalidPart"):
            bucket.copy("source", "key", 10)
    assert server.requests[0].headers["x-amz-copy-source"] == "bucket/p/source"


def test_parts_of_an_upload_that_is_gone(s3_settings: pytest.MonkeyPatch) -> None:
    """It is named, and not repeated."""
    with scripted(refused(404, "NoSuchUpload")) as server:
        bucket = _bucket(server, s3_settings)
        with pytest.raises(NoSuchResource, match="the upload does not exist"):
            bucket.put_part("key", "u", 1, [memoryview(b"x")])
        bucket.abort("key", "u")
    assert len(server.requests) == 2


def test_a_server_that_refuses_before_it_has_read(s3_settings: pytest.MonkeyPatch) -> None:
    """Its reason is heard although the body never went out."""
    said = refused(403, "AccessDenied")
    with scripted(Said(said.data, "close", body_bytes_max=1000)) as server:
        bucket = _bucket(server, s3_settings, retry_s=5.0)
        with pytest.raises(StorageFailed, match="AccessDenied"):
            bucket.put_part("key", "u", 1, [memoryview(bytes(2**26))])


def test_silence_ends(s3_settings: pytest.MonkeyPatch) -> None:
    """Before an answer, in its body, and while a body is sent that nothing reads."""
    s3_settings.setattr(client, "SILENCE_S", 0.2)
    stalls = (
        Said(then="stall"),
        Said(answer(200, b"01234", ETAG, length=10), "stall"),
        Said(then="stall", body_bytes_max=10),
    )
    for said in stalls:
        with scripted(said) as server:
            bucket = _bucket(server, s3_settings, retry_s=0.0)
            with pytest.raises(StorageFailed, match="silent for too long"):
                bucket.put_part("key", "u", 1, [memoryview(bytes(2**26))]) if said.body_bytes_max else bucket.read("key")
    with scripted(stalls[0]) as server:
        bucket = _bucket(server, s3_settings)
        assert bucket.put("key", b"1", if_absent=True).outcome == "unknown"


def test_connections_are_kept(s3_settings: pytest.MonkeyPatch) -> None:
    """One after the other needs one connection, also after refusals."""
    with scripted(READ, refused(404, "NoSuchKey"), DONE, READ) as server:
        bucket = _bucket(server, s3_settings)
        bucket.read("key")
        with pytest.raises(NoSuchResource):
            bucket.read("other")
        bucket.put("key", b"1")
        bucket.head("key")
        bucket.read("key")
        assert server.connections == 1


def test_a_bucket_that_is_full(s3_settings: pytest.MonkeyPatch) -> None:
    """Quota and disk are `NoSpace`, whatever the server calls them."""
    for said in (refused(403, "QuotaExceeded"), refused(507, "InsufficientStorage"), Said(answer(507))):
        with scripted(said) as server:
            bucket = _bucket(server, s3_settings)
            with pytest.raises(NoSpace):
                bucket.put("key", b"1")

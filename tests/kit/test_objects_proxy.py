"""What the fault proxy does to a request, as a client sees it and as the server has it afterwards."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import pytest

from tests.daemons import wait_until
from tests.kit.objects import TestBucket
from tests.kit.objects_proxy import (
    INTERNAL_ERROR,
    SLOW_DOWN,
    Conditions,
    CutAnswer,
    CutRequest,
    FaultProxy,
    Late,
    LoseAnswer,
    Stall,
    faulty,
)
from tests.kit.test_objects import status

LARGE = bytes(range(256)) * 4096  # more than sockets hold
BROKEN = (ConnectionError, http.client.IncompleteRead, http.client.RemoteDisconnected)
SILENCE_S = 0.5


@pytest.fixture
def proxy(moto_bucket: TestBucket) -> Iterator[FaultProxy]:
    with faulty(moto_bucket.server.endpoint) as made:
        yield made


class Client:
    """Sends requests whose signature moto does not look at, on one connection."""

    SIGNED = "AWS4-HMAC-SHA256 Credential=testkey/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"

    def __init__(self, proxy: FaultProxy, bucket: TestBucket) -> None:
        address = urlsplit(proxy.endpoint)
        assert address.hostname is not None
        self._bucket = bucket.name
        self._answer: http.client.HTTPResponse | None = None
        self._connection = http.client.HTTPConnection(address.hostname, address.port, timeout=180)

    def ask(self, method: str, key: str, body: bytes | None = None) -> tuple[int, bytes]:
        self.send(method, key, body)
        self._answer = self._connection.getresponse()
        self.date = self._answer.headers["Date"]
        return self._answer.status, self._answer.read()

    def silent(self, timeout_s: float = SILENCE_S) -> bool:
        """Whether what was asked last is still not answered after a while; the connection is of no use then."""
        self._connection.sock.settimeout(timeout_s)
        try:
            self._connection.getresponse()
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self._connection.close()
        if self._answer is not None:
            self._answer.close()

    def send(self, method: str, key: str, body: bytes | None) -> None:
        self._connection.request(method, f"/{self._bucket}/{key}", body=body, headers={"Authorization": self.SIGNED})


@pytest.fixture
def client(proxy: FaultProxy, moto_bucket: TestBucket) -> Iterator[Client]:
    made = Client(proxy, moto_bucket)
    yield made
    made.close()


def test_requests_are_forwarded_and_counted(client: Client, proxy: FaultProxy, moto_bucket: TestBucket) -> None:
    """Of any size, one after the other on a connection, by kind and key."""
    assert client.ask("PUT", "run/a%20b", LARGE)[0] == 200
    with proxy.counted() as counts:
        assert client.ask("GET", "run/a%20b") == (200, LARGE)
        assert client.ask("HEAD", "run/a%20b") == (200, b"")
        assert client.ask("GET", "?list-type=2&prefix=run/")[0] == 200
        assert client.ask("DELETE", "run/a%20b")[0] == 204
    assert counts == {"get": 1, "head": 1, "list": 1, "delete": 1}
    assert proxy.kinds("^run/a b$") == {"put": 1, "get": 1, "head": 1, "delete": 1}
    assert [one.status for one in proxy.seen] == [200, 200, 200, 200, 204]


def test_parts_have_kinds_of_their_own(proxy: FaultProxy, moto_bucket: TestBucket) -> None:
    s3, name = moto_bucket.server.through(proxy.endpoint), moto_bucket.name
    upload = s3.create_multipart_upload(Bucket=name, Key="k")["UploadId"]
    tag = s3.upload_part(Bucket=name, Key="k", UploadId=upload, PartNumber=1, Body=b"1")["ETag"]
    s3.list_parts(Bucket=name, Key="k", UploadId=upload)
    parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
    s3.complete_multipart_upload(Bucket=name, Key="k", UploadId=upload, MultipartUpload=parts)
    s3.abort_multipart_upload(Bucket=name, Key="l", UploadId=s3.create_multipart_upload(Bucket=name, Key="l")["UploadId"])
    s3.list_multipart_uploads(Bucket=name)
    s3.copy_object(Bucket=name, Key="c", CopySource=f"{name}/k")
    s3.delete_objects(Bucket=name, Delete={"Objects": [{"Key": "c"}]})
    kinds = ["begin", "part", "parts", "complete", "begin", "abort", "uploads", "copy", "deletes"]
    assert [one.kind for one in proxy.seen] == kinds


def test_a_rule_is_for_the_nth_of_a_kind_and_key(client: Client, proxy: FaultProxy) -> None:
    rule = proxy.on(SLOW_DOWN, "put", "^a", nth=2, times=2)
    said = [client.ask("PUT", key, b"1")[0] for key in ("a1", "b1", "a2", "b2", "a3", "a4")]
    assert said == [200, 200, 503, 200, 503, 200]
    assert rule.hits == 2


def test_a_refusal_is_answered_with_its_code_and_does_nothing(
    client: Client, proxy: FaultProxy, moto_bucket: TestBucket
) -> None:
    proxy.on(INTERNAL_ERROR, "put")
    status, body = client.ask("PUT", "a", LARGE)
    assert status == 500 and b"<Code>InternalError</Code>" in body
    assert moto_bucket.sizes() == {}


def test_a_lost_answer_is_of_a_request_that_was_done(client: Client, proxy: FaultProxy, moto_bucket: TestBucket) -> None:
    proxy.on(LoseAnswer(), "put")
    with pytest.raises(BROKEN):
        client.ask("PUT", "a", b"1")
    assert moto_bucket.read("a") == b"1"
    assert proxy.seen[0].status == 200


def test_a_request_that_is_cut_is_not_done(client: Client, proxy: FaultProxy, moto_bucket: TestBucket) -> None:
    proxy.on(CutRequest(1000), "put")
    with pytest.raises(BROKEN):
        client.ask("PUT", "a", LARGE)
    assert moto_bucket.sizes() == {}


def test_an_answer_that_is_cut_has_its_first_bytes(client: Client, proxy: FaultProxy, moto_bucket: TestBucket) -> None:
    moto_bucket.put("a", LARGE)
    proxy.on(CutAnswer(1000), "get")
    with pytest.raises(BROKEN):
        client.ask("GET", "a")


@pytest.mark.parametrize("done", [False, True])
def test_a_stalled_request_hangs(client: Client, proxy: FaultProxy, moto_bucket: TestBucket, done: bool) -> None:
    """Until it is released. The server has done it, or has not."""
    proxy.on(Stall(done), "put")
    client.send("PUT", "a", b"1")
    if done:
        wait_until(lambda: "a" in moto_bucket.sizes())
    assert client.silent()
    proxy.release()
    assert moto_bucket.sizes() == ({"a": 1} if done else {})


def test_a_late_request_is_done_after_its_client_was_cut_off(
    client: Client, proxy: FaultProxy, moto_bucket: TestBucket
) -> None:
    proxy.on(Late(SILENCE_S), "put")
    with pytest.raises(BROKEN):
        client.ask("PUT", "a", b"1")
    proxy.settle()
    assert moto_bucket.sizes() == {"a": 1}


def test_a_clock_can_be_off(client: Client, proxy: FaultProxy) -> None:
    def date() -> float:
        client.ask("HEAD", "a")
        return parsedate_to_datetime(client.date).timestamp()

    before, proxy.skew_s = date(), 86_400.0
    assert abs(date() - before - 86_400) < 3600


def test_a_server_can_say_yes_to_everything(client: Client, proxy: FaultProxy, moto_bucket: TestBucket) -> None:
    proxy.says_yes = True
    assert client.ask("PUT", "a", b"1")[0] == 200
    assert client.ask("GET", "a") == (200, b"")
    assert moto_bucket.sizes() == {}


def test_every_connection_can_be_broken(client: Client, proxy: FaultProxy) -> None:
    client.ask("HEAD", "a")
    proxy.reset()
    with pytest.raises(BROKEN):
        client.ask("HEAD", "a")


def test_a_server_that_is_away_breaks_connections(moto_bucket: TestBucket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with faulty(f"http://127.0.0.1:{port}") as before_nothing:
        client = Client(before_nothing, moto_bucket)
        with pytest.raises(BROKEN):
            client.ask("HEAD", "a")
        client.close()


@pytest.mark.parametrize(
    ("conditions", "put", "complete"),
    [("honoured", 412, 412), ("ignored", 200, 200), ("refused", 501, 501), ("refused but for put", 412, 501)],
)
def test_a_server_can_lie_about_conditions(
    seaweedfs_bucket: TestBucket, conditions: Conditions, put: int, complete: int
) -> None:
    """Signatures hold, of requests that go on as they are and of those that lose a header."""
    name, key = seaweedfs_bucket.name, "a b/ü+1"
    seaweedfs_bucket.put(key, b"1")
    with faulty(seaweedfs_bucket.server.endpoint) as proxy:
        proxy.conditions = conditions
        s3 = seaweedfs_bucket.server.through(proxy.endpoint)
        assert status(s3.put_object, Bucket=name, Key=key, Body=b"2", IfNoneMatch="*") == put
        upload = s3.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
        tag = s3.upload_part(Bucket=name, Key=key, UploadId=upload, PartNumber=1, Body=LARGE)["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": tag}]}
        end = {"Bucket": name, "Key": key, "UploadId": upload, "MultipartUpload": parts}
        assert status(s3.complete_multipart_upload, **end, IfNoneMatch="*") == complete
    assert seaweedfs_bucket.read(key) == (LARGE if complete == 200 else b"2" if put == 200 else b"1")


def test_a_link_can_be_slow(client: Client, proxy: FaultProxy) -> None:
    """All that goes through shares its bytes a second."""
    proxy.bytes_per_s = 2.0 * len(LARGE)
    began = time.monotonic()
    client.ask("PUT", "a", LARGE)
    assert client.ask("GET", "a") == (200, LARGE)
    assert time.monotonic() - began >= 0.9

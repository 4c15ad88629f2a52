"""Bytes of slots between nodes, over real sockets: what is asked for comes, proven; nobody else reads anything."""

from __future__ import annotations

import http.client
import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from holdfast_formats.digest import DIGITS, digest
from holdfast_formats.errors import RoundAborted
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.wings.cluster.exchange import proofs
from holdfast_service.wings.cluster.exchange import ranges as wanted
from holdfast_service.wings.cluster.exchange import server as serving
from holdfast_service.wings.cluster.exchange.fetching import Peer
from holdfast_service.wings.cluster.exchange.node_connection import NodeConnection, Unproven
from holdfast_service.wings.cluster.exchange.server import ExchangeServer

SECRET = "s" * 43


@pytest.fixture
def exchange() -> Iterator[ExchangeServer]:
    made = ExchangeServer("127.0.0.1", secrets=lambda: (SECRET,))
    yield made
    made.close()


def never(seconds: float) -> bool:
    return False


def post(exchange: ExchangeServer, path: str, body: bytes) -> tuple[int, bytes]:
    with closing(NodeConnection(exchange.url, [SECRET], 180, 180)) as connection:
        answer = connection.request(path, body)
        return answer.status, answer.response.read()


def raw(exchange: ExchangeServer, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
    """As who knows no secret asks, after the challenge that everybody gets."""
    at = urlsplit(exchange.url)
    with closing(http.client.HTTPConnection(at.hostname or "", at.port, timeout=180)) as connection:
        connection.request("POST", proofs.CHALLENGE_PATH)
        assert proofs.is_nonce(connection.getresponse().read().decode())
        connection.request("POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_ranges_come_to_their_places(exchange: ExchangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks, over several chunks, from any place; what was not asked for stays as it was."""
    monkeypatch.setattr(wanted, "CHUNK_BYTES", 1000)
    slots = {3: memoryview(os.urandom(10_000)), 5: memoryview(os.urandom(5000))}
    exchange.offer(7, slots)
    into = {3: memoryview(bytearray(10_000)), 5: memoryview(bytearray(5000))}
    peer = Peer("a", exchange.url, (SECRET,))
    for asked in ([SlotRange(3, 17, 4321), SlotRange(5, 0, 5000)], [SlotRange(3, 9999, 10_000)]):
        peer.fetch(7, asked, into, never)
        for one in asked:
            assert into[one.rank][one.begin : one.end] == slots[one.rank][one.begin : one.end]
    assert bytes(into[3][:17]) == bytes(17) and bytes(into[3][4321:9999]) == bytes(9999 - 4321)
    peer.close()


def test_who_does_not_know_the_secret_reads_nothing(exchange: ExchangeServer) -> None:
    """Nor while there is no secret yet, however empty the stated one is."""
    exchange.offer(7, {0: memoryview(b"private")})
    asked = wanted.encode_asked([SlotRange(0, 0, 7)])
    nonce, proof = "0" * 32, "0" * 64
    for stated in ("", "Bearer ", f"Bearer {SECRET}", "Holdfast", f"Holdfast {nonce}", f"Holdfast {nonce} {proof}", "\xff"):
        headers = {"Authorization": stated, proofs.BODY_HEADER: proofs.body_digest(asked)}
        assert raw(exchange, "/rounds/7/bytes", asked, headers) == (401, b"")
    for secrets in (["x"], [""], [], [SECRET + "x", SECRET[:-1]]):
        connection = NodeConnection(exchange.url, secrets, 180, 180)
        with closing(connection), pytest.raises(Unproven, match="shares no secret"):
            connection.request("/rounds/7/bytes", asked)
    exchange.secrets = tuple
    with closing(NodeConnection(exchange.url, [SECRET, ""], 180, 180)) as connection, pytest.raises(Unproven):
        connection.request("/rounds/7/bytes", asked)


def test_a_refusal_arrives_though_the_request_was_not_read(exchange: ExchangeServer) -> None:
    """Closed with bytes that were not read, the connection was reset, and the asking node did not try its next secret."""
    at = urlsplit(exchange.url)
    with socket.create_connection((at.hostname, at.port), 60) as asking:
        asking.sendall(b"POST /held HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
        for _ in range(30):  # the refusal is sent before most of it comes
            asking.sendall(bytes(100_000))
            time.sleep(0.01)
        assert asking.recv(2**16).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/rounds/8/bytes", b'{"ranges":[[0,0,7]]}', 409),
        ("/rounds/7/bytes/", b'{"ranges":[[0,0,7]]}', 400),
        ("/rounds/07/bytes", b'{"ranges":[[0,0,7]]}', 400),
        ("/", b"", 400),
        ("/rounds/7/bytes", b"{}", 400),
        ("/rounds/7/bytes", b'{"ranges":[[0,0,8]]}', 400),
        ("/rounds/7/bytes", b'{"ranges":[[0,-1,7]]}', 400),
        ("/rounds/7/bytes", b'{"ranges":[[0,3,3]]}', 400),
        ("/rounds/7/bytes", b'{"ranges":[[0,5,3]]}', 400),
        ("/rounds/7/bytes", b'{"ranges":[[1,0,7]]}', 400),
        ("/rounds/7/bytes", b'{"ranges":[[0,0,7]],"more":1}', 400),
        ("/rounds/7/bytes", b"[" * 100_000, 400),
    ],
)
def test_nothing_but_ranges_of_what_is_offered(exchange: ExchangeServer, path: str, body: bytes, status: int) -> None:
    """Other rounds, other ranks, and what lies outside of a slot."""
    exchange.offer(7, {0: memoryview(b"private")})
    assert post(exchange, path, body) == (status, b"")
    exchange.withdraw(7)
    assert post(exchange, "/rounds/7/bytes", b'{"ranges":[[0,0,7]]}') == (409, b"")


def test_other_methods_are_not_served(exchange: ExchangeServer) -> None:
    """There is one thing that can be asked."""
    at = urlsplit(exchange.url)
    for method in ("GET", "PUT", "DELETE", "OPTIONS"):
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=180)
        connection.request(method, "/rounds/7/bytes")
        assert connection.getresponse().status == 501
        connection.close()


def test_changed_bytes_are_asked_for_again(exchange: ExchangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not match its digest is fetched once more; if it never does, the save ends by the node's name."""
    content = os.urandom(100)
    exchange.offer(7, {0: memoryview(content)})
    right, wrong = serving.digest, [2]

    def lying(data: memoryview) -> str:
        wrong[0] -= 1
        return "0" * 16 if wrong[0] >= 0 else right(data)

    monkeypatch.setattr(serving, "digest", lying)
    into = {0: memoryview(bytearray(100))}
    with closing(Peer("a", exchange.url, (SECRET,))) as peer:
        peer.fetch(7, [SlotRange(0, 0, 100)], into, lambda seconds: True)
    assert bytes(into[0]) == content
    wrong[0] = 100
    with pytest.raises(RoundAborted, match="node a did not send"), closing(Peer("a", exchange.url, (SECRET,))) as peer:
        peer.fetch(7, [SlotRange(0, 0, 100)], into, never)


def test_a_round_that_is_not_offered_yet_is_waited_for(exchange: ExchangeServer) -> None:
    """The other node has not seen yet that all parts are there."""
    into = {0: memoryview(bytearray(3))}
    asked = []

    def wait(seconds: float) -> bool:
        asked.append(seconds)
        if len(asked) == 3:
            exchange.offer(7, {0: memoryview(b"abc")})
        return len(asked) < 200

    with closing(Peer("a", exchange.url, (SECRET,))) as peer:
        peer.fetch(7, [SlotRange(0, 0, 3)], into, wait)
    assert bytes(into[0]) == b"abc" and asked


def test_a_node_that_is_gone(exchange: ExchangeServer) -> None:
    """The error names it."""
    url = exchange.url
    exchange.close()
    with pytest.raises(RoundAborted, match="node b did not send"), closing(Peer("b", url, (SECRET,))) as peer:
        peer.fetch(7, [SlotRange(0, 0, 3)], {0: memoryview(bytearray(3))}, never)


def test_slots_that_are_withdrawn_are_not_proven_any_more(exchange: ExchangeServer) -> None:
    """While its bytes are on their way the round ends, and its slot is written over by the next save: what comes then does
    not match the digest of what was there, or has none, so nobody writes it anywhere.
    """
    data = bytearray(os.urandom(2 * wanted.CHUNK_BYTES))
    offered = bytes(data)
    exchange.offer(7, {0: memoryview(data)})
    connection = NodeConnection(exchange.url, [SECRET], 180, 180)
    body = wanted.encode_asked([SlotRange(0, 0, len(data))])
    answer = connection.request("/rounds/7/bytes", body)  # the rest of the first chunk waits for its reader
    exchange.withdraw(7)
    data[:] = os.urandom(len(data))
    exchange.offer(8, {0: memoryview(data)})
    with closing(connection), pytest.raises(http.client.IncompleteRead) as cut:
        answer.response.read()
    came, proof = cut.value.partial[: wanted.CHUNK_BYTES], cut.value.partial[wanted.CHUNK_BYTES :]
    assert len(proof) <= DIGITS
    assert came == offered[: wanted.CHUNK_BYTES] or answer.proof.chunk(digest(came)).encode() != proof

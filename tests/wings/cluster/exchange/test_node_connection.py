"""Whoever listens at a node's address learns no secret, and is believed nothing."""

from __future__ import annotations

import http.client
import socketserver
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from holdfast_formats.digest import digest
from holdfast_formats.errors import RoundAborted
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.daemon.arena.memory_checkpoints import MemoryStep
from holdfast_service.wings.cluster.exchange import proofs
from holdfast_service.wings.cluster.exchange.fetching import Peer
from holdfast_service.wings.cluster.exchange.holders import HolderLost, HoldingNode
from holdfast_service.wings.cluster.exchange.node_connection import NodeConnection, Unproven
from holdfast_service.wings.cluster.exchange.server import ExchangeServer

OLD, NEW = "o" * 43, "n" * 43
STEP = MemoryStep("run", 7, 2, 0, 4)


class Thief:
    """Listens where a node was, answers whatever is given, and keeps what it hears."""

    def __init__(self, *answers: bytes) -> None:
        self.heard = b""
        thief, given = self, iter(answers)

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for answer in given:
                    thief.heard += self.request.recv(65_536)
                    self.request.sendall(answer)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(body: bytes, *headers: str) -> bytes:
    return "\r\n".join(("HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", "")).encode() + body


@contextmanager
def serving(*secrets: str) -> Iterator[ExchangeServer]:
    with closing(ExchangeServer("127.0.0.1", secrets=lambda: secrets)) as exchange:
        exchange.offer(7, {0: memoryview(b"private")})
        yield exchange


@contextmanager
def challenged() -> Iterator[tuple[ExchangeServer, http.client.HTTPConnection, str]]:
    """A node, a connection to it, and the nonce that it has made up for the connection."""
    with (
        serving(NEW) as exchange,
        closing(http.client.HTTPConnection(exchange.url.removeprefix("http://"), timeout=180)) as here,
    ):
        here.request("POST", proofs.CHALLENGE_PATH)
        yield exchange, here, here.getresponse().read().decode()


def fetched(exchange: ExchangeServer, *secrets: str) -> bytes:
    into = {0: memoryview(bytearray(7))}
    with closing(Peer("a", exchange.url, secrets)) as peer:
        peer.fetch(7, [SlotRange(0, 0, 7)], into, lambda seconds: False)
    return bytes(into[0])


NONCE = answer(b"0" * 32)


@pytest.mark.parametrize(
    "answers",
    [
        (b"HTTP/1.1 401 no\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",) * 2,
        (answer(b""),),
        (answer(b"short"),),
        (answer(b"0" * 4_000_000),),
        (NONCE, b"HTTP/1.1 401 no\r\nContent-Length: 0\r\n\r\n", NONCE, b"HTTP/1.1 401 no\r\nContent-Length: 0\r\n\r\n"),
        (NONCE, answer(b"forged!" + digest(b"forged!").encode())),
        (NONCE, answer(b"forged!" + digest(b"forged!").encode(), f"{proofs.PROOF_HEADER}: {'0' * 64}")),
        (NONCE, answer(b'{"slots":[]}' + digest(b'{"slots":[]}').encode())),
    ],
)
def test_whoever_took_the_address_of_a_dead_node_learns_nothing_and_is_not_believed(answers: tuple[bytes, ...]) -> None:
    """Whatever it answers: bytes of a save that are not a node's would be published, and slots that it names be believed."""
    with closing(Thief(*answers)) as thief:
        into = {0: memoryview(bytearray(7))}
        peer = Peer("a", thief.url, (NEW, OLD))
        with closing(peer), pytest.raises(RoundAborted, match="node a did not send"):
            peer.fetch(7, [SlotRange(0, 0, 7)], into, lambda seconds: False)
        assert bytes(into[0]) == bytes(7)
        assert thief.heard and NEW.encode() not in thief.heard and OLD.encode() not in thief.heard
    with closing(Thief(*answers)) as thief:
        with pytest.raises(HolderLost):
            HoldingNode("a", thief.url, (NEW, OLD)).slots(STEP, 5)
        assert thief.heard and NEW.encode() not in thief.heard and OLD.encode() not in thief.heard


def test_a_closed_connection_keeps_no_socket() -> None:
    """Nor does an answer of which nothing more is read, after which the server closes the connection."""
    unread = answer(b"forged!", "Connection: close")
    with closing(Thief(NONCE, unread)) as thief, closing(NodeConnection(thief.url, [NEW], 180, 180)) as connection:
        with pytest.raises(Unproven) as refused:
            connection.request("/rounds/7/bytes", b'{"ranges":[[0,0,7]]}')
        response = refused.traceback[-1].frame.f_locals["response"]
        assert not response.closed
        connection.close()
        assert response.closed


def test_what_was_heard_is_of_no_use_at_the_node_itself() -> None:
    """Neither at another address of the cluster, nor later at the same one."""
    with serving(NEW) as exchange, closing(Thief(NONCE, b"")) as thief:
        asking = NodeConnection(thief.url, [NEW], 180, 180)
        with closing(asking), pytest.raises((OSError, http.client.HTTPException)):
            asking.request("/rounds/7/bytes", b'{"ranges":[[0,0,7]]}')
        head, _, body = thief.heard.partition(b"\r\n\r\n")[2].partition(b"\r\n\r\n")
        stated = dict(line.split(": ", 1) for line in head.decode().splitlines()[1:])
        assert stated["Authorization"].startswith("Holdfast ")
        again = http.client.HTTPConnection(exchange.url.removeprefix("http://"), timeout=180)
        for challenge in (False, True):
            with closing(again):
                if challenge:
                    again.request("POST", proofs.CHALLENGE_PATH)
                    again.getresponse().read()
                again.request("POST", "/rounds/7/bytes", body, stated)
                assert again.getresponse().status == 401


def test_a_request_that_was_heard_is_not_answered_twice() -> None:
    """On the very connection on which it was made."""
    with challenged() as (exchange, here, nonce):
        body = b'{"ranges":[[0,0,7]]}'
        asked = proofs.NodeQuestion(exchange.url, nonce, 1, "/rounds/7/bytes", proofs.body_digest(body)).proven(NEW)
        headers = {"Authorization": asked.authorization, proofs.BODY_HEADER: proofs.body_digest(body)}
        for status in (200, 401):
            here.request("POST", "/rounds/7/bytes", body, headers)
            answered = here.getresponse()
            answered.read()
            assert answered.status == status


def test_a_body_that_is_not_the_proven_one_is_refused() -> None:
    """Somebody between the two changes it on its way."""
    with challenged() as (exchange, here, nonce):
        stated = proofs.body_digest(b'{"ranges":[[0,0,1]]}')
        asked = proofs.NodeQuestion(exchange.url, nonce, 1, "/rounds/7/bytes", stated).proven(NEW)
        headers = {"Authorization": asked.authorization, proofs.BODY_HEADER: stated}
        here.request("POST", "/rounds/7/bytes", b'{"ranges":[[0,0,7]]}', headers)
        assert here.getresponse().status == 400


@pytest.mark.parametrize(
    ("here", "there"),
    [((NEW, OLD), (OLD,)), ((OLD,), (NEW, OLD)), ((NEW, OLD), (NEW, OLD)), ((NEW,), (NEW, OLD)), ((NEW, OLD), (NEW,))],
)
def test_while_a_secret_is_rotated_nodes_understand_each_other(here: tuple[str, ...], there: tuple[str, ...]) -> None:
    """One of two has heard of the new secret already; afterwards the old one opens nothing."""
    with serving(*there) as exchange:
        assert fetched(exchange, *here) == b"private"
    with serving(NEW) as exchange, pytest.raises(RoundAborted):
        fetched(exchange, OLD)


def test_a_connection_serves_several_questions() -> None:
    """With one challenge; and after it was closed, with another."""
    with serving(NEW) as exchange, closing(NodeConnection(exchange.url, [OLD, NEW], 180, 180)) as connection:
        for number in range(4):
            found = connection.request("/rounds/7/bytes", b'{"ranges":[[0,0,7]]}')
            assert found.response.read(7) == b"private"
            found.check(digest(b"private"))
            if number == 1:
                connection.close()


def test_a_node_that_is_hung_up_on_is_not_asked_again() -> None:
    """The limit for all of an answer holds for what is asked with the next secret as well."""
    with serving(OLD) as exchange:
        connection = NodeConnection(exchange.url, [NEW, OLD], 180, 180)
        connection.connect()
        connection.hang_up()
        with closing(connection), pytest.raises((OSError, Unproven, http.client.HTTPException)):
            connection.request("/rounds/7/bytes", b'{"ranges":[[0,0,7]]}')
        with closing(connection), pytest.raises(TimeoutError):
            connection.close()
            connection.connect()

"""Bodies and connections: what is not looked at, who is too slow, and what is no HTTP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from holdfast_service.api.access import bodies, connections
from holdfast_service.api.access.authentication import Policy
from tests.api.guarded import Guarded, code, guarded
from tests.daemons import wait_until
from tests.serving import received


@pytest.fixture(scope="module")
def ajar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded(tmp_path_factory.mktemp("open"), Policy()) as made:
        yield made


@pytest.fixture
def emptied(tmp_path: Path) -> Iterator[Guarded]:
    """A service of one test's own: connections that earlier tests have closed may hold some of the places that it counts."""
    with guarded(tmp_path / "root", Policy()) as made:
        yield made


POLICY = "/v1/runs/team-a/policy"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"last": 1, "last": 2}', 400),
        (b'{"last": NaN}', 400),
        (b'{"last": Infinity}', 400),
        (b'{"last": 1e999}', 400),
        (b'{"last": 9223372036854775808}', 400),
        (b'{"last": ' + b"9" * 5000 + b"}", 400),
        (b'{"last": 1}\xff', 400),
        (b'{"best": [{"metric": "\\ud800", "mode": "min", "count": 1}]}', 400),
        (b"[" * 100_000, 413),
        (b'{"a":' * 50 + b"1" + b"}" * 50, 413),
        (b'{"steps": [' + b"1," * 600_000 + b"1]}", 413),
        (b'{"last"', 400),
        (b"\x00", 400),
    ],
)
def test_json_that_is_not_looked_at(ajar: Guarded, body: bytes, status: int) -> None:
    """Two values for one name, no numbers, depth and length without end: refused before anything reads them."""
    before = ajar.ask("GET", POLICY)
    answer = ajar.ask("PUT", POLICY, content=body, headers={"If-Match": "*", "Content-Type": "application/json"})
    assert code(answer)[0] == status, answer.text
    assert ajar.ask("GET", POLICY).text == before.text


def test_strings_are_no_structure() -> None:
    """Brackets and quotes within a text are not counted."""
    text = json.dumps({"a": "[" * 100 + '"\\' + "{" * 100})
    assert bodies.parse(text.encode()) == json.loads(text)


def test_a_body_longer_than_it_says(ajar: Guarded) -> None:
    """Neither the length that is stated nor one that is not lets a body in that is too long."""

    def pieces() -> Iterator[bytes]:
        yield from (b" " * 2**16 for _ in range(17))

    assert code(ajar.ask("PUT", POLICY, content=pieces())) == (413, "limit-exceeded")
    with raw(ajar) as connection:
        connection.sendall(b"PUT /v1/runs/team-a/policy HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in received(connection).splitlines()[0]


@contextmanager
def raw(guard: Guarded) -> Iterator[socket.socket]:
    host, _, port = guard.running.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=180) as connection:
        yield connection


def stream(guard: Guarded, opened: ExitStack) -> None:
    """A connection that stays busy until `opened` ends."""
    busy = opened.enter_context(raw(guard))
    busy.sendall(STREAM)
    assert busy.recv(65_536).startswith(b"HTTP/1.1 200")


def test_a_body_that_trickles(ajar: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up by name, and its connection closed."""
    monkeypatch.setattr(bodies, "BODY_WAIT_MAX_S", 0.2)
    with raw(ajar) as connection:
        connection.sendall(b"PUT /v1/runs/team-a/policy HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        answer = received(connection)
    assert b" 504 " in answer.splitlines()[0] and b"deadline-exceeded" in answer


def until_closed(connection: socket.socket, send: Callable[[], None], limit_s: float) -> bool:
    """Whether the service hangs up while we go on sending."""
    end = time.monotonic() + limit_s
    connection.settimeout(0.05)
    while time.monotonic() < end:
        try:
            send()
            if connection.recv(1) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_a_head_that_trickles(ajar: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header a moment keeps no connection open, be it the first request or one behind another."""
    monkeypatch.setattr(connections, "HEAD_WAIT_MAX_S", 1.0)
    for before in (b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with raw(ajar) as connection:
            connection.sendall(before)
            if before:
                assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
            connection.sendall(b"GET /v1/runs HTTP/1.1\r\nHost: localhost\r\n")
            assert until_closed(connection, lambda c=connection: c.sendall(b"X-A: b\r\n"), 20)


def test_a_slow_answer_is_no_slow_head(ajar: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock for heads stands while a request is being answered."""
    monkeypatch.setattr(connections, "HEAD_WAIT_MAX_S", 4.0)  # in which this head does come

    def slow() -> None:
        time.sleep(5)

    readiness = ajar.running.services.control.catalog.rounds.counts
    monkeypatch.setattr(ajar.running.services.control.catalog.rounds, "counts", lambda: (slow(), readiness())[1])
    assert ajar.ask("GET", "/readyz").status_code == 200


@pytest.mark.parametrize("length", [65_000, 66_500, 131_000, 250_000])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_head_over_its_limit(ajar: Guarded, length: int, at_once: bool) -> None:
    """64 KiB, however they arrive: in one piece that is read at once, or in several."""
    head = b"GET /v1/runs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX: " + b"y" * length + b"\r\n\r\n"
    with raw(ajar) as connection:
        with suppress(OSError):
            for part in [head] if at_once else [head[at : at + 30_000] for at in range(0, len(head), 30_000)]:
                connection.sendall(part)
        answer = received(connection)
    assert (b" 200 " in answer.partition(b"\r\n")[0]) is (length == 65_000), answer[:300]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 200_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http(ajar: Guarded, request_bytes: bytes) -> None:
    """It is answered with a problem, or cut off; the service goes on."""
    with raw(ajar) as connection:
        with suppress(OSError):
            connection.sendall(request_bytes)
            connection.shutdown(socket.SHUT_WR)
        answer = received(connection)
    assert answer == b"" or (b" 40" in answer.splitlines()[0] and b"problem+json" in answer)
    assert ajar.ask("GET", "/healthz").status_code == 200


HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAM = b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n"


def test_connections_that_ask_nothing_give_way(emptied: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are open and idle, before or behind a request: one more is served, and another one after it."""
    monkeypatch.setattr(connections, "connections_max", lambda: 3)
    with ExitStack() as opened:
        held = [opened.enter_context(raw(emptied)) for _ in range(3)]
        held[1].sendall(HEALTH)
        assert held[1].recv(65_536).startswith(b"HTTP/1.1 200")
        held[2].sendall(b"GET /healthz HTTP/1.1\r\nHost: lo")
        for _ in range(3):
            late = opened.enter_context(raw(emptied))
            late.sendall(HEALTH)
            assert late.recv(65_536).startswith(b"HTTP/1.1 200")


def test_too_many_connections(emptied: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all are busy, the one too many is told to come again; those before it go on."""
    monkeypatch.setattr(connections, "connections_max", lambda: 3)
    with ExitStack() as opened:
        for _ in range(3):
            stream(emptied, opened)
        with raw(emptied) as late:
            assert b" 503 " in received(late).splitlines()[0]
    wait_until(lambda: answers(emptied))


def test_requests_of_one_peer_leave_room(emptied: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three quarters of all places are the most that one address, or one token, has; health is always told."""
    monkeypatch.setattr(connections, "connections_max", lambda: 8)
    with ExitStack() as opened:
        for _ in range(6):
            stream(emptied, opened)
        assert code(emptied.ask("GET", "/v1/runs")) == (503, "daemon-gone")
        assert emptied.ask("GET", "/v1/runs", emptied.token()).status_code == 200
        assert emptied.ask("GET", "/healthz").status_code == 200
    wait_until(lambda: answers(emptied))


def answers(guard: Guarded) -> bool:
    """Whether a connection more is served; one that is turned away may be cut off before it has read why."""
    with suppress(httpx.TransportError):
        return guard.ask("GET", "/healthz").status_code == 200
    return False

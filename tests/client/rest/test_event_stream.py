"""The client's end of the event stream: what it does while the service is away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from holdfast import Api
from holdfast.rest import jobs
from holdfast_formats.errors import DaemonGone

EVENT = '{{"id": {id}, "at": "2026-11-21T00:00:00Z", "kind": "k", "level": "info", "text": "t", "node": "n"}}'
START, HOUR_S = 1000.0, 3600.0


class Clock:
    """Time that passes in sleeps, and where a test says so."""

    def __init__(self) -> None:
        self.now = START

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(jobs, "time", made)
    return made


@contextmanager
def service(*connections: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A service that answers so often, each time as it is told, breaks the connection, and then is away for good."""
    left = list(connections)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            left.pop(0)(self)
            if not left:
                server.socket.close()  # from now on nobody is met here

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)

    def serve() -> None:
        while left:
            server.handle_request()

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"


def tell(number: int) -> Callable[[BaseHTTPRequestHandler], None]:
    def act(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.end_headers()
        handler.wfile.write(f"id: {number}\nevent: k\ndata: {EVENT.format(id=number)}\n\n".encode())

    return act


def told(url: str, patience_s: float, heard: threading.Event) -> list[int]:
    """The ids that came, up to where the client gives up; `heard` is set at the first."""
    found: list[int] = []
    with Api(url) as api, pytest.raises(DaemonGone):
        for event in api.events(after=0, patience_s=patience_s):
            found.append(event.id)
            heard.set()
    return found


def test_a_quiet_stream_that_breaks_is_mended(clock: Clock) -> None:
    """Patience begins when the service is away, not with the last event, which may be long ago."""

    heard = threading.Event()

    def quiet(handler: BaseHTTPRequestHandler) -> None:
        tell(1)(handler)
        handler.wfile.flush()
        assert heard.wait(180)
        clock.now += HOUR_S
        handler.wfile.write(b"id: 2\nevent: k\nda")  # and it breaks

    def broken(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True

    with service(quiet, broken, tell(2)) as url:
        assert told(url, 30, heard) == [1, 2]
    assert START + HOUR_S + 30 < clock.now < START + HOUR_S + 100


def test_who_was_never_met_is_not_waited_for(clock: Clock) -> None:
    """A service that is not there is an error at once."""

    def broken(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True

    with service(broken) as url:
        assert told(url, 30, threading.Event()) == []
    assert clock.now == START

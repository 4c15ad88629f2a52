"""Who reaches the port at which nodes read each other's memory, and is none of them."""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import ExitStack
from urllib.parse import urlsplit

from holdfast_service.daemon.exchange import held
from holdfast_service.daemon.exchange.server import STRANGERS_MAX, ExchangeServer
from tests.daemons import wait_until


def test_who_shows_no_secret_uses_no_thread_of_the_daemon_up() -> None:
    """A thousand connections that say nothing: the daemon keeps as many as it has said, and answers a node as before, on a
    connection of before and on a new one.
    """
    server = ExchangeServer("127.0.0.1")
    server.secret = "secret"
    at = urlsplit(server.url)
    assert at.hostname is not None and at.port is not None
    before = threading.active_count()
    with ExitStack() as held_open:
        node = http.client.HTTPConnection(at.hostname, at.port, timeout=20)
        assert _status(node) == 400
        for _ in range(1000):
            held_open.enter_context(socket.create_connection((at.hostname, at.port), timeout=20))
        assert _status(node) == 400
        another = http.client.HTTPConnection(at.hostname, at.port, timeout=20)
        assert _status(another) == 400
        wait_until(lambda: threading.active_count() - before <= STRANGERS_MAX + 2, 20)
        node.close()
        another.close()
    wait_until(lambda: threading.active_count() <= before)
    server.close()


def _status(node: http.client.HTTPConnection) -> int:
    """What a node is told that shows the secret and asks for what cannot be."""
    node.request("POST", held.SLOTS_PATH, b"{}", {"Authorization": "Bearer secret"})
    answer = node.getresponse()
    answer.read()
    return answer.status

"""Who reaches the port at which nodes read each other's memory, and is none of them."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from urllib.parse import urlsplit

from holdfast_service.wings.cluster.exchange.node_connection import NodeConnection
from holdfast_service.wings.cluster.exchange.server import STRANGERS_MAX, ExchangeServer
from tests.daemons import wait_until


def test_who_shows_no_secret_uses_no_thread_of_the_daemon_up() -> None:
    """A thousand connections that say nothing: the daemon keeps as many as it has said, and answers a node as before, on a
    connection of before and on a new one.
    """
    server = ExchangeServer("127.0.0.1")
    server.secrets = lambda: ("secret",)
    server.offer(7, {0: memoryview(b"private")})
    at = urlsplit(server.url)
    assert at.hostname is not None and at.port is not None
    before = threading.active_count()
    with ExitStack() as held_open:
        node = NodeConnection(server.url, ["secret"], 180, 180)
        assert _status(node) == 200
        for _ in range(1000):
            held_open.enter_context(socket.create_connection((at.hostname, at.port), timeout=180))
        assert _status(node) == 200
        another = NodeConnection(server.url, ["secret"], 180, 180)
        assert _status(another) == 200
        wait_until(lambda: threading.active_count() - before <= STRANGERS_MAX + 2)
        node.close()
        another.close()
    wait_until(lambda: threading.active_count() <= before)
    server.close()


def _status(node: NodeConnection) -> int:
    """What a node is told that proves the secret and asks for what is offered."""
    answer = node.request("/rounds/7/bytes", b'{"ranges":[[0,0,7]]}')
    answer.response.read()
    return int(answer.status)

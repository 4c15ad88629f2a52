"""An exchange with a daemon: a connection to its socket, and the answer that was asked for."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from holdfast_formats.errors import DaemonGone, from_problem
from holdfast_formats.staging import wire
from holdfast_formats.staging.socket_paths import addressable

CONNECT_TIMEOUT_S = 5.0
HINT = "start one with `holdfast serve`, or pass a directory as at= to use an embedded one"
SILENT_HINT = "it may be frozen, or its machine overloaded: look at its log, and restart it if `holdfast top` shows nothing"

Expected = TypeVar("Expected", bound=wire.Reply)


def connect(path: Path) -> socket.socket:
    """A connection to the daemon at a socket; `DaemonGone` where none answers."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        with addressable(path) as name:
            connection.connect(name)
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise DaemonGone(f"no daemon answers at {path}: {error}", hint=HINT) from error
    return connection


def hang_up(connection: socket.socket) -> None:
    """End a connection, for threads that wait for something from it too."""
    with suppress(OSError):  # the other side may be gone
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def expected(message: wire.Request, reply: wire.Reply, kind: type[Expected]) -> Expected:
    """The reply, which must be of this kind; raises the error that a `Failed` one carries."""
    if isinstance(reply, wire.Failed):
        raise from_problem(reply.problem)
    if not isinstance(reply, kind):
        raise DaemonGone(f"the daemon answered {type(message).__name__} with {type(reply).__name__}")
    return reply

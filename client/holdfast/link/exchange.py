"""Connects to a daemon's socket, and checks the types of its replies."""

from __future__ import annotations

import os
import socket
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from holdfast_formats.errors import DaemonGone, DeadlineExceeded, from_problem
from holdfast_formats.staging import wire
from holdfast_formats.staging.socket_paths import addressable

CONNECT_TIMEOUT_S = 5.0
RECEIVE_BYTES = 65_536
HINT = "start one with `holdfast serve`, or pass a directory as at= to use an embedded one"
CLOSED_HINT = "run as that user, or start the daemon with --socket-group and a group that both users are in"
SILENT_HINT = (
    "the daemon may be stopped, swapped out or overloaded: check its log, and restart it if `holdfast top` shows nothing"
)
_CREDENTIALS = struct.Struct("3i")

Expected = TypeVar("Expected", bound=wire.Reply)


def connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(CONNECT_TIMEOUT_S)
        with addressable(path) as name:
            connection.connect(name)
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise _unreached(path, error) from error
    return connection


def _unreached(path: Path, error: OSError) -> DaemonGone:
    """Why the socket was not reached; on missing permission, which path is closed and its owner."""
    if isinstance(error, PermissionError):
        above = (place for place in reversed(path.parents) if not os.access(place, os.X_OK, effective_ids=True))
        closed = next(above, path)
        with suppress(OSError):
            status, kind = os.stat(closed), "socket" if closed == path else "directory"
            return DaemonGone(
                f"user {os.geteuid()} may not use the daemon at {path}: the {kind} {closed} belongs to user {status.st_uid} "
                f"and group {status.st_gid}, with mode {stat.S_IMODE(status.st_mode):04o}",
                hint=CLOSED_HINT,
            )
    return DaemonGone(f"no daemon answers at {path}: {error}", hint=HINT)


class SocketPeer(NamedTuple):
    """The process at the other end, as the kernel reports it; pid 0 for one that this process cannot see."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> SocketPeer:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return SocketPeer(*_CREDENTIALS.unpack(found))


def name_of(connection: socket.socket, path: Path) -> str:
    """The daemon at the other end, for errors: with its pid if this process can see it."""
    try:
        pid = peer_of(connection).pid
    except OSError:
        pid = 0
    return f"the daemon at {path} (pid {pid})" if pid > 0 else f"the daemon at {path}"


def ping(path: Path, timeout_s: float) -> None:
    """Ping the daemon at a socket: `DeadlineExceeded` if it does not answer in time, `DaemonGone` if there is none."""
    limit = time.monotonic() + timeout_s
    decoder, connection = wire.FrameDecoder(wire.TO_RANK), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with connection, addressable(path) as name:
            connection.settimeout(timeout_s)
            connection.connect(name)
            connection.sendall(wire.encode_frame(wire.Ping(id=0)))
            while not decoder.feed(data := connection.recv(RECEIVE_BYTES)):
                if not data:
                    raise DaemonGone(f"the daemon at {path} closed the connection", hint=HINT)
                connection.settimeout(max(limit - time.monotonic(), 0.001))
    except (TimeoutError, BlockingIOError) as error:  # the second: the daemon's queue of connections is full
        raise DeadlineExceeded(f"the daemon at {path} did not respond within {timeout_s:.1f} s") from error
    except OSError as error:
        raise _unreached(path, error) from error


def hang_up(connection: socket.socket) -> None:
    """End a connection, and wake the threads that read from it."""
    with suppress(OSError):  # the other side may be gone
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def expected(message: wire.Request, reply: wire.Reply, kind: type[Expected]) -> Expected:
    """The reply, checked for its type; raises the error of a `Failed` one."""
    if isinstance(reply, wire.Failed):
        raise from_problem(reply.problem)
    if not isinstance(reply, kind):
        raise DaemonGone(f"the daemon answered {type(message).__name__} with {type(reply).__name__}")
    return reply

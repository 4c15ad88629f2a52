"""The socket of a connected rank: frames and file descriptors in both directions, and the connection's end."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast_formats.errors import InvalidRequest, LimitExceeded
from holdfast_formats.staging import wire
from holdfast_service.daemon.arena.callers import Caller
from holdfast_service.daemon.arena.peer import PeerProcess, hung_up

log = logging.getLogger(__name__)

RECEIVE_BYTES = 65_536
FDS_MAX = 16


class Unsent(OSError):
    """The rank disconnected before it got the message."""


class RankSocket:
    """Messages of one rank. Any thread may send, hang up, and query whether the rank is gone; only one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.peer = PeerProcess(connection)
        self._send_lock = threading.Lock()
        self._ending, self._over = threading.Lock(), False  # the lock: no thread queries a descriptor that is being closed
        self._decoder = wire.FrameDecoder(wire.TO_DAEMON)
        self._fds: list[int] = []  # that came, and that no request has taken yet

    def caller(self) -> Caller:
        return Caller.of(self._connection)

    def process(self) -> PeerProcess:
        """Another handle of the connected process, which the caller closes: it may outlive the connection."""
        return PeerProcess(self._connection)

    def has_lost_its_rank(self) -> bool:
        """Whether the connected process is gone, even if a child of it holds the connection open."""
        with self._ending:
            return self._over or self.peer.gone or hung_up(self._connection)

    def hang_up(self) -> None:
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the rank had already disconnected: %s", error)

    def limit_wait(self, timeout_s: float) -> None:
        """Let the next receive or send fail after this time."""
        self._connection.settimeout(timeout_s)

    def requests(self) -> Iterator[list[wire.Request]]:
        """The requests of each receive, until the rank hangs up."""
        while data := self._receive():
            yield self._decoder.feed(data)

    def _receive(self) -> bytes:
        data, fds, _, _ = socket.recv_fds(self._connection, RECEIVE_BYTES, 1)
        for fd in fds:
            os.set_inheritable(fd, False)
        self._fds += fds
        if len(self._fds) > FDS_MAX:
            raise LimitExceeded(f"received {len(self._fds)} unexpected file descriptors")
        return data

    @contextmanager
    def received_fd(self, what: str) -> Iterator[int]:
        """The next descriptor that came, for the length of a block."""
        if not self._fds:
            raise InvalidRequest(f"attaching {what} needs its file descriptor")
        fd = self._fds.pop(0)
        try:
            yield fd
        finally:
            os.close(fd)

    def send(self, message: wire.Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message with these descriptors, which stay open; `Unsent` if the rank has disconnected."""
        frame = wire.encode_frame(message)
        try:
            with self._send_lock:
                if fds:
                    sent = socket.send_fds(self._connection, [frame], list(fds))
                    frame = frame[sent:]
                self._connection.sendall(frame)
        except OSError as error:
            raise Unsent(*error.args) from error

    def notify(self, message: wire.Outcome | wire.Stop) -> None:
        """Send a message that is no reply. It is lost if the rank has disconnected."""
        try:
            self.send(message)
        except OSError as error:
            what = f"the outcome of step {message.step}" if isinstance(message, wire.Outcome) else "that it is to stop"
            log.info("cannot tell a rank %s: %s", what, error)

    def close(self) -> None:
        """Close the connection and all descriptors that no request has taken."""
        with self._ending:
            self._over = True
            self._connection.close()
            self.peer.close()
        for fd in self._fds:
            os.close(fd)
        self._fds = []

"""The connection to one daemon: frames and file descriptors in both directions."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.link.exchange import RECEIVE_BYTES, hang_up, name_of
from holdfast_formats.errors import DaemonGone
from holdfast_formats.staging import wire

log = logging.getLogger(__name__)

SEND_WAIT_S = 0.1  # for the turn of a message that may be lost


class DaemonSocket:
    """Any thread may send, take descriptors, and end the connection; only one receives."""

    def __init__(self, connection: socket.socket, path: Path) -> None:
        self._connection, self._path = connection, path
        self._sending = threading.Lock()  # a daemon that reads nothing blocks senders, not receivers
        self._taking = threading.RLock()  # a handler of a signal may close the link within a call
        self._fds: list[int] = []  # that came, and that no request has taken yet
        self._released = False

    @property
    def name(self) -> str:
        return name_of(self._connection, self._path)

    def send(self, message: wire.Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message with these descriptors, which stay open."""
        frame = wire.encode_frame(message)
        with self._sending:
            sent = socket.send_fds(self._connection, [frame], list(fds)) if fds else 0
            self._connection.sendall(frame[sent:])

    def send_or_lose(self, message: wire.Message) -> None:
        """Send a message, which is silently lost if the daemon is gone or does not read."""
        frame = wire.encode_frame(message)
        if not self._sending.acquire(timeout=SEND_WAIT_S):
            return
        try:
            sent = self._connection.send(frame, socket.MSG_DONTWAIT)
            self._connection.sendall(frame[sent:])  # a frame that was begun must be whole
        except OSError as error:
            log.debug("a message to %s is lost: %s", self._path, error)
        finally:
            self._sending.release()

    def messages(self) -> Iterator[Any]:
        """What the daemon sends, until it closes the connection."""
        decoder = wire.FrameDecoder(wire.TO_RANK)
        while True:
            data, fds, _, _ = socket.recv_fds(self._connection, RECEIVE_BYTES, wire.HELD_RANKS_MAX)
            with self._taking:
                for fd in fds:
                    os.set_inheritable(fd, False)
                self._fds += fds
                if self._released:
                    self._close_fds()
            if not data:
                return
            yield from decoder.feed(data)

    def take_fds(self, count: int) -> list[int]:
        """The descriptors of the last reply; the caller closes them. `DaemonGone` if they are lost."""
        with self._taking:
            if len(self._fds) < count:
                raise DaemonGone("the daemon's reply came without shared memory")
            taken, self._fds = self._fds[:count], self._fds[count:]
            return taken

    def shut_down(self) -> None:
        """End the connection for both sides, and wake the threads that send and receive."""
        with suppress(OSError):  # the daemon may have hung up first
            self._connection.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        hang_up(self._connection)

    def release_fds(self) -> None:
        """Close the descriptors that no request has taken, and all that still come."""
        with self._taking:
            self._released = True
            self._close_fds()

    def close(self) -> None:
        """Close the connection, and the descriptors that no request has taken."""
        self._connection.close()
        self.release_fds()

    def leave_to_parent(self) -> None:
        """Close this end in a forked child, in which there is no thread that could give back a lock."""
        self._sending, self._taking = threading.Lock(), threading.RLock()
        self.close()

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

"""The holder: a small process that keeps descriptors of shared memory while no daemon lives.

    holder.py --socket PATH --listener N

At its socket, one packet is one request and one packet its answer: `keep NAME` brings a descriptor, `drop NAME` lets one
go, `list` is answered by one packet `held NAME` with its descriptor for each, then `end`. It imports nothing but the
standard library, so that it starts in a blink and costs next to no memory. Left alone by daemons for a while, it lets go of
segments in which nothing is sealed (ranks that live have descriptors of their own); what is sealed it keeps until a daemon
comes. It ends when it has held nothing and nobody has been connected for a while.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import struct
import sys
import time
from pathlib import Path

LINGER_S = 3.0
ALONE_S = 120.0  # longer than ranks look for the next daemon
CHECK_S = 0.5
PACKET_BYTES_MAX = 512
SEGMENTS_MAX = 4096
PAGE_BYTES = 4096
SEALED = 2
CREDENTIALS = struct.Struct("iII")  # SO_PEERCRED: process, user, group


class Holder:
    """The descriptors by name, and the connections at which they are asked for."""

    def __init__(self, listener: socket.socket) -> None:
        self._held: dict[str, int] = {}
        self._connections = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._listener = listener

    def serve(self) -> None:
        """Answer until nothing has been held, and nobody been there, for a while."""
        needed = attended = time.monotonic()
        while time.monotonic() - needed < LINGER_S:
            for key, _ in self._selector.select(CHECK_S):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    if not is_ours(connection):
                        connection.close()
                        continue
                    self._selector.register(connection, selectors.EVENT_READ)
                    self._connections += 1
                elif not self._hear(key.fileobj):
                    self._selector.unregister(key.fileobj)
                    key.fileobj.close()
                    self._connections -= 1
            if self._connections:
                attended = time.monotonic()
            if time.monotonic() - attended > ALONE_S:
                self._let_go_of_unsealed()
            if self._held or self._connections:
                needed = time.monotonic()

    def _let_go_of_unsealed(self) -> None:
        for name in [name for name, fd in self._held.items() if not holds_sealed(fd)]:
            os.close(self._held.pop(name))

    def _hear(self, connection: socket.socket) -> bool:
        """One request; False when the daemon is gone."""
        try:
            packet, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES_MAX, 1)
            if packet:
                connection.send(self._answer(connection, packet.decode(errors="replace").split(" "), fds))
            for fd in fds:
                os.close(fd)
            return bool(packet)
        except OSError:
            return False

    def _answer(self, connection: socket.socket, words: list[str], fds: list[int]) -> bytes:
        match words:
            case ["keep", name] if fds and name not in self._held and len(self._held) < SEGMENTS_MAX:
                self._held[name] = fds.pop()
                return b"done"
            case ["drop", name] if name in self._held:
                os.close(self._held.pop(name))
                return b"done"
            case ["list"]:
                for name, fd in self._held.items():
                    socket.send_fds(connection, [f"held {name}".encode()], [fd])
                return b"end"
            case _:
                return b"refused"


def is_ours(connection: socket.socket) -> bool:
    """Whether this user, or root, is at the other end: what is held is not for others, whatever the socket's mode is."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(credentials)[1] in (0, os.geteuid())


def holds_sealed(fd: int) -> bool:
    """Whether any slot of a segment is sealed, by docs/format.md § 11, repeated here so that nothing need be imported."""
    head = os.pread(fd, 32, 0)
    if len(head) < 32:
        return False
    slots, data_bytes, table_bytes = struct.unpack_from("<IQQ", head, 12)
    slot_bytes = PAGE_BYTES + data_bytes + table_bytes
    if PAGE_BYTES + slots * slot_bytes > os.fstat(fd).st_size:
        return False
    starts = range(PAGE_BYTES, PAGE_BYTES + slots * slot_bytes, slot_bytes)
    return any(os.pread(fd, 4, start + 12) == SEALED.to_bytes(4, "little") for start in starts)


def main() -> int:
    """Take over the listening socket that the daemon opened for us, and serve."""
    parser = argparse.ArgumentParser(prog="holder.py")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--listener", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is meant for the daemon and the trainer
    ours = arguments.socket.stat().st_ino
    with socket.socket(fileno=arguments.listener) as listener:
        Holder(listener).serve()
        if arguments.socket.exists() and arguments.socket.stat().st_ino == ours:  # another holder may have come since
            arguments.socket.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A small TCP proxy that counts, slows, stalls and cuts what goes through it towards the server."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE_BYTES = 16_384


class Proxy:
    """Forwards connections to `port`. `cut_after` bytes more, all connections are reset, once; then it works again."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sent = self.cuts = 0
        self.cut_after: int | None = None
        self.bytes_per_s: float | None = None
        self.flows = threading.Event()
        self.flows.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._closing = True
        self.flows.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def reset(self) -> None:
        """Break every connection."""
        with self._lock:
            broken, self._open = self._open, set()
        for side in broken:
            with suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                side.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
            try:
                far.connect(("127.0.0.1", self.port))
            except OSError:
                near.close()
                far.close()
                continue
            with self._lock:
                self._open |= {near, far}
            threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, upwards: bool) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if upwards and not self._passes(len(data)):
                    break
                target.sendall(data)
        with self._lock:
            self._open -= {source}
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        if not upwards:
            with suppress(OSError):
                source.shutdown(socket.SHUT_RDWR)
        source.close()

    def _passes(self, size: int) -> bool:
        self.flows.wait()
        with self._lock:
            self.sent += size
            cut = self.cut_after is not None and self.sent >= self.cut_after
            if cut:
                self.cut_after = None
                self.cuts += 1
            elif self.bytes_per_s is not None:
                time.sleep(size / self.bytes_per_s)  # under the lock: all connections share the link
        if cut:
            self.reset()
        return not cut


@contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    """A proxy to a service for the length of a block."""
    proxy = Proxy(int(url.rpartition(":")[2]))
    try:
        yield proxy
    finally:
        proxy.close()

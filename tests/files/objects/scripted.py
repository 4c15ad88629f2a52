"""A server of HTTP that answers as it was told, one answer after the other: cut, late, wrong, or not at all."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

STALL_S = 60.0


class Received(NamedTuple):
    """A request as it arrived."""

    line: str
    headers: dict[str, str]
    body: bytes


class Said(NamedTuple):
    """What the server does with a request: it reads so much of its body, sends `data`, and may then stall or break off."""

    data: bytes = b""
    then: str = "keep"  # or "stall", "reset", "close"
    body_bytes_max: int | None = None


class ScriptedServer:
    """Each request gets the next answer; the last one is repeated. `requests` are those that arrived."""

    def __init__(self, answers: Sequence[Said], tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._answers, self.requests = list(answers), list[Received]()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.connections = self.ended = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"

    def say(self, *answers: Said) -> None:
        """From now on these."""
        with self._lock:
            self._answers = list(answers)

    def close(self) -> None:
        self._ended.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with (
            suppress(OSError),
            self._tls.wrap_socket(connection, server_side=True) if self._tls else connection as connection,
        ):
            stream = connection.makefile("rb")
            while line := stream.readline():
                headers = {}
                while (header := stream.readline().strip()) != b"":
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                with self._lock:
                    said = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                wanted = int(headers.get("content-length", 0))
                body = stream.read(wanted if said.body_bytes_max is None else min(wanted, said.body_bytes_max))
                with self._lock:
                    self.requests.append(Received(line.decode().strip(), headers, body))
                connection.sendall(said.data)
                if said.then == "stall":
                    self._ended.wait(STALL_S)
                if said.then == "reset" and self._tls is None:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                if said.then != "keep":
                    with suppress(OSError):  # `stream` would keep it open
                        connection.shutdown(socket.SHUT_RDWR)
                    stream.close()
                    self.ended += 1
                    return


@contextmanager
def scripted(*answers: Said, tls: ssl.SSLContext | None = None) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answers, tls)
    try:
        yield server
    finally:
        server.close()


def answer(status: int, body: bytes = b"", headers: str = "", length: int | None = None) -> bytes:
    """The bytes of an answer, whose stated length may be another than its body's."""
    head = f"HTTP/1.1 {status} Said\r\nDate: Sun, 29 Nov 2026 21:00:00 GMT\r\n{headers}"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def refused(status: int, code: str, more: str = "", headers: str = "") -> Said:
    """An answer with an error of S3."""
    return Said(answer(status, f"<Error><Code>{code}</Code><Message>It was said.</Message>{more}</Error>".encode(), headers))

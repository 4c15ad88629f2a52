"""Real receivers: a web server that takes webhooks, and a mail server with STARTTLS, TLS and login."""

from __future__ import annotations

import base64
import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from email import message_from_bytes
from email.message import Message
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

CERTIFICATE = Path(__file__).with_name("localhost.pem")  # for localhost and 127.0.0.1, with its key
USER, PASSWORD = "daemon", "the password of the mail server"


class Got(NamedTuple):
    """A request that a web server got."""

    path: str
    headers: dict[str, str]
    body: bytes


class Web(ThreadingHTTPServer):
    """Takes whatever is posted. `status` is what it answers, with `more` headers."""

    daemon_threads = True

    def __init__(self, tls: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Posted)
        self.got: list[Got] = []
        self.status, self.more = 200, dict[str, str]()
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server_address[1]}"
        if tls:
            self.socket = _server_context().wrap_socket(self.socket, server_side=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not trust the certificate ends the connection."""


class _Posted(BaseHTTPRequestHandler):
    server: Web

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.got.append(Got(self.path, {k.lower(): v for k, v in self.headers.items()}, body))
        self.send_response(self.server.status)
        for name, value in self.server.more.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"an answer that nobody is to read")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


class Mail(socketserver.ThreadingTCPServer):
    """A mail server that takes mail after a login over TLS alone."""

    daemon_threads, allow_reuse_address = True, True

    def __init__(self, tls: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Conversation)
        self.got: list[Message] = []
        self.envelopes: list[tuple[str, list[str]]] = []
        self.goodbye = "221 goodbye"
        self.place, self.tls = f"127.0.0.1:{self.server_address[1]}", tls

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that does not trust the certificate ends the connection."""


class _Conversation(socketserver.StreamRequestHandler):
    server: Mail

    def handle(self) -> None:
        self.secure, self.known = self.server.tls, False
        if self.server.tls:
            self._wrap()
        self._say("220 ready")
        sender, to = "", list[str]()
        while line := self.rfile.readline():
            word, _, rest = line.decode().strip().partition(" ")
            word = word.upper()
            if word == "EHLO":
                self._say("250-localhost", "250 AUTH PLAIN" if self.secure else "250 STARTTLS")
            elif word == "STARTTLS":
                self._say("220 go on")
                self._wrap()
            elif word == "AUTH":
                given = base64.b64decode(rest.partition(" ")[2]).decode().split("\0")[1:]
                self.known = self.secure and given == [USER, PASSWORD]
                self._say("235 welcome" if self.known else "535 who are you")
            elif word == "MAIL":
                sender, to = rest, []
                self._say("250 fine" if self.known else "530 log in first")
            elif word == "RCPT":
                to.append(rest)
                self._say("250 fine")
            elif word == "DATA":
                self._say("354 go on")
                self._take(sender, to)
            else:
                if word == "QUIT" and not self.server.goodbye:
                    return
                self._say(self.server.goodbye if word == "QUIT" else "250 fine")

    def _take(self, sender: str, to: list[str]) -> None:
        lines = []
        while (line := self.rfile.readline()) not in (b".\r\n", b""):
            lines.append(line.removeprefix(b"."))
        self.server.envelopes.append((sender, to))
        self.server.got.append(message_from_bytes(b"".join(lines), policy=default))
        self._say("250 taken")

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()
        self.request.close()

    def _wrap(self) -> None:
        self.rfile.close()
        self.wfile.close()
        self.request = _server_context().wrap_socket(self.request, server_side=True)
        self.rfile, self.wfile, self.secure = self.request.makefile("rb"), self.request.makefile("wb", 0), True

    def _say(self, *lines: str) -> None:
        self.wfile.write("".join(f"{line}\r\n" for line in lines).encode())


def _server_context() -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(CERTIFICATE)
    return made


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Let a server serve for the length of a block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        if isinstance(server, Endless):
            server.stop.set()
        server.shutdown()
        server.server_close()
        thread.join()


class Endless(socketserver.ThreadingTCPServer):
    """Says something without end, a piece at a time."""

    daemon_threads = True

    def __init__(self, begin: bytes, piece: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Endless)
        self.begin, self.piece, self.stop = begin, piece, threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Endless(socketserver.BaseRequestHandler):
    server: Endless

    def handle(self) -> None:
        with suppress(OSError):
            self.request.settimeout(0.2)
            with suppress(TimeoutError):
                self.request.recv(65_536)
            self.request.settimeout(None)
            self.request.sendall(self.server.begin)
            while not self.server.stop.wait(0.02):
                self.request.sendall(self.server.piece)


def endless(begin: bytes, piece: bytes) -> AbstractContextManager[Endless]:
    """A server that says `begin`, and then `piece` for ever."""
    return serving(Endless(begin, piece))


def secret(directory: Path, text: str, name: str = "secret") -> Path:
    """A file that only its owner reads."""
    path = directory / name
    path.touch(mode=0o600)
    path.write_text(text + "\n")
    return path

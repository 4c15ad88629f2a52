"""Requests as bytes on a socket: no client tidies them up."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

Header = tuple[str, str]


class Answer(NamedTuple):
    """What came back; status 0 where the connection was cut before there was one."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        found = json.loads(self.body) if self.body[:1] == b"{" else {}
        return str(found.get("code", ""))


def ask(url: str, method: str, target: str, headers: Iterable[Header] = (), body: bytes | None = None) -> Answer:
    """One request on a connection of its own, with these headers in this order, and Host and a length unless they say it."""
    given = list(headers)
    named = {name.lower() for name, _ in given}
    first = [] if "host" in named else [("Host", url.removeprefix("http://"))]
    if body is not None and not {"content-length", "transfer-encoding"} & named:
        given.append(("Content-Length", str(len(body))))
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in [*first, *given]), "Connection: close"]
    return read(url, "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b""))


def read(url: str, sent: bytes) -> Answer:
    """Send these bytes and read until the service hangs up."""
    host, _, port = url.removeprefix("http://").partition(":")
    got = b""
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        with suppress(OSError):
            connection.sendall(sent)
        with suppress(ConnectionError):
            while part := connection.recv(2**16):
                got += part
    head, _, body = got.partition(b"\r\n\r\n")
    if not head:
        return Answer(0, {}, b"")
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = (line.partition(":") for line in lines)
    return Answer(int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in fields}, body)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()

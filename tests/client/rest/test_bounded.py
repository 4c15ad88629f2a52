"""Answers of a machine that means no good, or is another thing: each is refused by name, and takes little memory."""

from __future__ import annotations

import gzip
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from holdfast import Api
from holdfast.rest import bounded, runs
from holdfast.rest.tokens import ServiceTokens
from holdfast_formats.errors import StorageFailed

MIB = 2**20
ENDLESS_BYTES = 256 * MIB  # what is sent if the client reads on


@contextmanager
def machine(head: str, body: bytes, times: int = 1, sent: list[int] | None = None) -> Iterator[Api]:
    """A client of what answers every request with this head, and so often with this body."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        connection.recv(65_536)
                        connection.sendall(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode())
                        for _ in range(times):
                            connection.sendall(body)
                            if sent is not None:
                                sent.append(len(body))

        threading.Thread(target=serve, daemon=True).start()
        with Api(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=180) as api:
            yield api


ENDLESS = {
    "an answer": lambda api: api.run("r"),
    "a list": lambda api: list(api.runs()),
    "a request": lambda api: api.request("GET", "/v1/audit", params={"format": "csv"}),
    "events": lambda api: list(api.events(after=0)),
    "a sign of life": lambda api: api.sign_of_life(60),
}


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("head", ["200 OK", "500 Internal Server Error"])
def test_an_answer_without_end(what: str, head: str) -> None:
    """It is read to the bound and not beyond, errors too."""
    sent: list[int] = []
    with machine(head, b"x" * MIB, ENDLESS_BYTES // MIB, sent) as api, pytest.raises(StorageFailed, match="bytes"):
        ENDLESS[what](api)
    assert sum(sent) < 64 * MIB


def test_a_range_that_is_longer_than_what_was_asked_for() -> None:
    """More bytes of a file than were asked for are no part of it."""
    with machine("206 Partial Content", b"x" * MIB, 100) as api, pytest.raises(StorageFailed, match="more than 10 bytes"):
        api.file_range("r", 1, "model.safetensors", 0, memoryview(bytearray(10)))


def test_a_compressed_answer() -> None:
    """It was not asked for, and some kilobytes of it can be gigabytes."""
    body = gzip.compress(b" " * 64 * MIB)
    with machine("200 OK\r\nContent-Encoding: gzip", body) as api, pytest.raises(StorageFailed, match="compressed"):
        api.health()


NONSENSE = {
    "objects": b'{"items":[' + b"{}," * MIB + b"{}]}",
    "lists": b'{"items":[{"metrics":{"a":[' + b"[]," * (MIB // 4) + b"[]]}}]}",
    "numbers": b'{"items":[' + b"0," * MIB + b"0]}",
    "names": b'{"items":{' + b",".join(b'"%d":0' % number for number in range(MIB // 4)) + b"}}",
    "depth": b"[" * MIB,
    "not UTF-8": b'{"items":["\xff"]}',
    "an invalid number": b'{"items":[1e999]}',
    "no page": b'{"next":[]}',
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_refused_at_its_first_mistake(what: str) -> None:
    """It becomes no gigabytes of descriptions of mistakes: 4 MiB of it were 7 GiB."""
    with machine("200 OK", NONSENSE[what]) as api:
        calls: list[Any] = [
            lambda: list(api.checkpoints("r")),
            lambda: list(ServiceTokens(api).all()),
            lambda: runs.trash(api),
            lambda: api.job(1),
        ]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for call in calls:
            with pytest.raises(StorageFailed, match="invalid answer"):
                call()
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 * 1024  # KiB


def test_a_list_that_only_goes_on() -> None:
    """An empty page that promises another one would be asked for without end."""
    with machine("200 OK", b'{"items":[],"next":"a"}') as api, pytest.raises(StorageFailed, match="empty page"):
        list(api.runs())


def test_lines_of_a_stream() -> None:
    """Lines are whole wherever a stream is cut into parts, and a line has only the ends that its format has."""
    event = '{"id":1,"at":"2026-11-21T00:00:00Z","kind":"k","level":"info","text":"a\u2028b","node":"n"}'
    body = f": \r\nid: 1\r\nevent: k\r\nothers: x\r\ndata: {event}\r\n\r\n".encode()
    with machine("200 OK", body) as api:
        assert next(api.events(after=0)).text == "a\u2028b"
    assert bounded.LINE_BYTES_MAX < bounded.ANSWER_BYTES_MAX

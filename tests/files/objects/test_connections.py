"""Ways to a server: TLS, certificates of one's own, proxies, and processes that were forked."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast_files.objects import client
from holdfast_formats.errors import StorageFailed
from tests.files.objects.scripted import Said, answer, scripted
from tests.kit.tls import certificate, connect_proxy, serving

__all__ = ["certificate"]

DATA = os.urandom(3 * 2**20)
ETAG = 'ETag: "tag"\r\n'
READ, DONE = Said(answer(200, DATA, ETAG)), Said(answer(200, headers=ETAG))


def test_tls_with_an_authority_of_ones_own(certificate: Path, s3_settings: pytest.MonkeyPatch) -> None:
    """It is trusted when AWS_CA_BUNDLE names it; bytes go both ways, and the connection is kept."""
    s3_settings.setenv("AWS_CA_BUNDLE", str(certificate))
    with scripted(READ, DONE, READ, tls=serving(certificate)) as server:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p")
        assert bucket.read("key") == DATA
        assert bucket.put("key", DATA).outcome == "done"
        into = bytearray(len(DATA))
        assert bucket.read_into("key", 0, into) == len(DATA) and into == DATA
        bucket.close()
        assert server.connections == 1
    assert server.requests[1].body == DATA


def test_tls_with_an_unknown_authority(certificate: Path, s3_settings: pytest.MonkeyPatch) -> None:
    """Is refused, with the setting that would trust it, and no request goes out."""
    with scripted(READ, tls=serving(certificate)) as server:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p").using(retry_s=0.0)
        with pytest.raises(StorageFailed, match="certificate verify failed") as failed:
            bucket.read("key")
        bucket.close()
    assert "AWS_CA_BUNDLE" in failed.value.hint and not server.requests


@contextmanager
def plain_server() -> Iterator[str]:
    """The https URL of a server that speaks http, and refuses what it does not understand."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
        serving.join()


def test_the_wrong_scheme(s3_settings: pytest.MonkeyPatch) -> None:
    """https asked of a server of http is told apart from a server that is away."""
    with plain_server() as url:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", url)
        bucket = client.opened("s3://bucket/p").using(retry_s=0.0)
        with pytest.raises(StorageFailed) as failed:
            bucket.read("key")
        bucket.close()
    assert "http://" in failed.value.hint


@pytest.mark.parametrize("stalls", [Said(then="stall"), Said(answer(200, b"1", ETAG, length=10), "stall")])
def test_silence_ends_with_tls_too(stalls: Said, certificate: Path, s3_settings: pytest.MonkeyPatch) -> None:
    """Before an answer, and in its body."""
    s3_settings.setattr(client, "SILENCE_S", 0.3)
    s3_settings.setenv("AWS_CA_BUNDLE", str(certificate))
    with scripted(stalls, tls=serving(certificate)) as server:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p").using(retry_s=0.0)
        with pytest.raises(StorageFailed, match="silent for too long"):
            bucket.read("key")
        bucket.close()


def test_a_tunnel_through_a_proxy(certificate: Path, s3_settings: pytest.MonkeyPatch) -> None:
    """https goes through CONNECT, with the proxy's own password, which the server never gets."""
    s3_settings.setenv("AWS_CA_BUNDLE", str(certificate))
    with scripted(READ, tls=serving(certificate)) as server, connect_proxy() as between:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        s3_settings.setenv("HTTPS_PROXY", f"http://user:pass@{between.address}")
        bucket = client.opened("s3://bucket/p")
        assert bucket.read("key") == DATA
        bucket.close()
        connect, authorization = between.asked
        assert connect.startswith(f"CONNECT {server.url.removeprefix('https://')} ")
    assert authorization == "Proxy-Authorization: Basic dXNlcjpwYXNz"
    assert "proxy-authorization" not in server.requests[0].headers


def test_http_through_a_proxy(s3_settings: pytest.MonkeyPatch) -> None:
    """The proxy gets the whole URL, and the server's own name as the host."""
    with scripted(READ) as between:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", "http://store.example:9000")
        s3_settings.setenv("HTTP_PROXY", between.url)
        bucket = client.opened("s3://bucket/p")
        assert bucket.read("key") == DATA
        bucket.close()
    assert between.requests[0].line == "GET http://store.example:9000/bucket/p/key HTTP/1.1"
    assert between.requests[0].headers["host"] == "store.example:9000"


def test_a_forked_process_opens_its_own(s3_settings: pytest.MonkeyPatch) -> None:
    """Two processes that answer on one connection would get each other's bytes."""
    with scripted(READ) as server:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p")
        bucket.read("key")
        child = os.fork()
        if child == 0:
            os._exit(0 if bucket.read("key") == DATA else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert bucket.read("key") == DATA
        bucket.close()
        assert server.connections == 2


@contextmanager
def slow_to_continue(requests: int) -> Iterator[tuple[str, list[float]]]:
    """A server that sends the head of each answer by itself, and for how many seconds each head was not acknowledged."""
    waits: list[float] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(requests):
                    while b"\r\n\r\n" not in connection.recv(65536):
                        pass
                    connection.sendall(f"HTTP/1.1 200 OK\r\n{ETAG}Content-Length: 1\r\n\r\n".encode())
                    waits.append(_until_acknowledged(connection))
                    connection.sendall(b"1")

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", waits
        serving.join()


def _until_acknowledged(connection: socket.socket) -> float:
    began, left = time.monotonic(), array.array("i", [1])
    while left[0]:
        fcntl.ioctl(connection, termios.TIOCOUTQ, left)
    return time.monotonic() - began


def test_the_head_of_an_answer_is_acknowledged_at_once(s3_settings: pytest.MonkeyPatch) -> None:
    """A server with Nagle's algorithm sends the body only then. By itself the kernel acknowledges after 40 ms."""
    with slow_to_continue(requests := 40) as (url, waits):
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", url)
        bucket = client.opened("s3://bucket/p")
        assert [bucket.read("key", 0, 1) for _ in range(requests)] == [b"1"] * requests
        bucket.close()
    assert min(waits[20:]) < 0.02  # the kernel does so by itself while a connection is new

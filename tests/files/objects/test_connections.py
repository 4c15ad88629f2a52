"""Ways to a server: TLS, certificates of one's own, proxies, and processes that were forked."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast_files.objects import client
from holdfast_formats.errors import StorageFailed
from tests.files.objects.scripted import Said, answer, scripted

DATA = os.urandom(3 * 2**20)
ETAG = 'ETag: "tag"\r\n'
READ, DONE = Said(answer(200, DATA, ETAG)), Said(answer(200, headers=ETAG))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that is its own authority, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


def _serving(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


class ConnectProxy:
    """A proxy that opens tunnels; `asked` are the lines by which it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                head = b""
                while b"\r\n\r\n" not in head:
                    head += near.recv(1)
                lines = head.decode().splitlines()
                self.asked += [line for line in lines if line.startswith(("CONNECT", "Proxy-"))]
                host, _, port = lines[0].split()[1].rpartition(":")
                far = socket.create_connection((host, int(port)))
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                threading.Thread(target=_tunnel, args=(near, far), daemon=True).start()


def _tunnel(near: socket.socket, far: socket.socket) -> None:
    with near, far:
        back = threading.Thread(target=_forward, args=(far, near), daemon=True)
        back.start()
        _forward(near, far)
        back.join()


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for one in (source, target):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy() -> Iterator[ConnectProxy]:
    running = ConnectProxy()
    try:
        yield running
    finally:
        running.close()


def test_tls_with_an_authority_of_ones_own(certificate: Path, s3_settings: pytest.MonkeyPatch) -> None:
    """It is trusted when AWS_CA_BUNDLE names it; bytes go both ways, and the connection is kept."""
    s3_settings.setenv("AWS_CA_BUNDLE", str(certificate))
    with scripted(READ, DONE, READ, tls=_serving(certificate)) as server:
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
    with scripted(READ, tls=_serving(certificate)) as server:
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
    with scripted(stalls, tls=_serving(certificate)) as server:
        s3_settings.setenv("AWS_ENDPOINT_URL_S3", server.url)
        bucket = client.opened("s3://bucket/p").using(retry_s=0.0)
        with pytest.raises(StorageFailed, match="silent for too long"):
            bucket.read("key")
        bucket.close()


def test_a_tunnel_through_a_proxy(certificate: Path, s3_settings: pytest.MonkeyPatch) -> None:
    """https goes through CONNECT, with the proxy's own password, which the server never gets."""
    s3_settings.setenv("AWS_CA_BUNDLE", str(certificate))
    with scripted(READ, tls=_serving(certificate)) as server, proxy() as between:
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

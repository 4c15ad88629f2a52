"""TLS and proxies before a server: a certificate of the tests' own, a relay that speaks TLS, and a proxy of tunnels."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


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


def serving(certificate: Path) -> ssl.SSLContext:
    """What a server needs to speak TLS with that certificate."""
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
def connect_proxy() -> Iterator[ConnectProxy]:
    """A proxy of tunnels for the length of a block."""
    running = ConnectProxy()
    try:
        yield running
    finally:
        running.close()


@contextmanager
def tls_before(endpoint: str, certificate: Path) -> Iterator[str]:
    """The https URL of a server that speaks http at `endpoint`."""
    behind, loop = urlsplit(endpoint), asyncio.new_event_loop()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(behind.hostname, behind.port)
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))

    listening = asyncio.start_server(relay, "127.0.0.1", 0, ssl=serving(certificate))
    server = loop.run_until_complete(listening)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _end(server: asyncio.Server) -> None:
    server.close()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)

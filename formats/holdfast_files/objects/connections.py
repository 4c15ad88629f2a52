"""Sends one HTTP request and reads its answer: a pool of connections that stay open, deadlines, proxies and TLS.

Bodies are sent out of the caller's memory, and answers are read into it. Every wait ends: connecting after `CONNECT_S`,
and each pause of a body or an answer after `silence_s`. Looking up a host's name is the system's to end.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import struct
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from threading import Lock
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

CONNECT_S = 10.0
IDLE_S = 20.0  # a connection that was not used for longer is not used again: servers and balancers close them
IDLE_MAX = 32
PIECE_BYTES = 2**23  # of a body between two looks for an early answer: each costs a switch of threads
READ_BUFFER_BYTES = 2**16
DRAIN_BYTES_MAX = 2**16  # of an answer that is not wanted, rather than a new connection

T = TypeVar("T")


class Outgoing(NamedTuple):
    """A request as it is sent: its target is path and query, quoted. `body` is None where there is none at all."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: Sequence[memoryview] | None
    silence_s: float


class LostAnswer(Exception):
    """No answer, or only a part of it. `body_sent`: all of the request had gone out, and may have been carried out."""

    def __init__(self, cause: BaseException, body_sent: bool) -> None:
        super().__init__(str(cause) or type(cause).__name__)
        self.cause, self.body_sent = cause, body_sent


class Incomplete(Exception):
    """An answer ended before its length."""


class Endpoint(NamedTuple):
    """Where requests go: the endpoint, the proxy before it (empty for none) and the certificates that it is checked by."""

    url: str
    proxy: str = ""
    ca_file: str | None = None


class Connections:
    """Connections to one endpoint. Safe for threads; a forked process opens its own."""

    def __init__(self, place: Endpoint) -> None:
        self._url, self._proxy = urlsplit(place.url), urlsplit(place.proxy)
        self._tls = None if self._url.scheme == "http" else _trusting(place.ca_file)
        self._lock, self._idle, self._pid = Lock(), list[_Idle](), os.getpid()
        self._closed = False

    def exchange(self, request: Outgoing, take: Callable[[HTTPResponse], T]) -> T:
        """Send a request, and return what `take` makes of its answer; raises `LostAnswer`, and what `take` raises."""
        connection = self._opened(request.silence_s)
        body_sent = is_whole = False
        try:
            body_sent = _send(connection, request, self._absolute(request.target))
            _acknowledge_at_once(connection.sock)
            response = connection.getresponse()
            taken = take(response)
            is_whole = body_sent and _is_drained(response)
        except (OSError, HTTPException, Incomplete) as error:
            raise LostAnswer(error, body_sent) from error
        finally:
            if is_whole and not response.will_close:
                self._put_back(connection)
            else:
                connection.close()
        return taken

    def close(self) -> None:
        """Close what is idle; what is in use closes after its request."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for one in idle:
            one.connection.close()

    def _opened(self, silence_s: float) -> HTTPConnection:
        connection = self._taken()
        try:
            if connection is None:
                connection = self._made()
                connection.connect()
            _limit_silence(connection.sock, silence_s)
        except (OSError, HTTPException) as error:
            assert connection is not None
            connection.close()
            raise LostAnswer(error, body_sent=False) from error
        return connection

    def _taken(self) -> HTTPConnection | None:
        """An idle connection that the server has not closed."""
        while True:
            with self._lock:
                if self._pid != os.getpid():  # the parent's, which goes on with them
                    self._idle, self._pid = [], os.getpid()
                if not self._idle:
                    return None
                one = self._idle.pop()
            if time.monotonic() - one.since < IDLE_S and not _is_readable(one.connection):
                return one.connection
            one.connection.close()

    def _put_back(self, connection: HTTPConnection) -> None:
        with self._lock:
            keep = not self._closed and len(self._idle) < IDLE_MAX and self._pid == os.getpid()
            if keep:
                self._idle.append(_Idle(connection, time.monotonic()))
        if not keep:
            connection.close()

    def _made(self) -> HTTPConnection:
        url, proxy = self._url, self._proxy
        first = proxy if proxy.hostname else url
        host, port = first.hostname or "", first.port
        if self._tls is None:
            plain = HTTPConnection(host, port or 80, timeout=CONNECT_S)
            plain.response_class = _WholeHead
            return plain
        # The way to a proxy is not encrypted, what goes through it is.
        default = 443 if first is url else 80
        connection = HTTPSConnection(host, port or default, timeout=CONNECT_S, context=self._tls)
        connection.response_class = _WholeHead
        if first is proxy:
            connection.set_tunnel(url.hostname or "", url.port or 443, _proxy_headers(proxy))
        return connection

    def _absolute(self, target: str) -> _Line:
        """A proxy gets the whole URL of what is not encrypted."""
        if self._tls is not None or not self._proxy.hostname:
            return _Line(target, {})
        return _Line(f"http://{self._url.netloc}{target}", _proxy_headers(self._proxy))


class _Received(RawIOBase):
    """What arrives at a socket. A large read takes one call of the kernel, in which other threads run."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        is_tls = isinstance(self._sock, ssl.SSLSocket)
        wait_all = 0 if is_tls or len(buffer) <= READ_BUFFER_BYTES else socket.MSG_WAITALL
        with _deadline():
            return self._sock.recv_into(buffer, 0, wait_all)


class _Lines(BufferedReader):
    """Remembers the last line that was read."""

    last = b""

    def readline(self, size: int | None = -1, /) -> bytes:
        self.last = super().readline(size)
        return self.last


class _WholeHead(HTTPResponse):
    """http.client takes a head that was cut for one that is whole: a length that lacks digits, a success without a body."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._made = self.fp  # it keeps the socket open
        self._lines = self.fp = _Lines(_Received(sock), READ_BUFFER_BYTES)

    def begin(self) -> None:
        super().begin()
        if self._lines.last not in (b"\r\n", b"\n"):
            raise Incomplete("the answer's head is cut")

    def close(self) -> None:
        super().close()
        self._made.close()

    def _close_conn(self) -> None:
        super()._close_conn()  # type: ignore[misc]
        self._made.close()


@contextmanager
def _deadline() -> Iterator[None]:
    """`TimeoutError` for what the kernel reports as a wait that has ended."""
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError from error


class _Idle(NamedTuple):
    connection: HTTPConnection
    since: float


class _Line(NamedTuple):
    target: str
    headers: Mapping[str, str]


def _limit_silence(sock: socket.socket, silence_s: float) -> None:
    """The kernel keeps the time: Python would ask before each call whether the socket is ready, and take its lock twice."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(silence_s)
        return
    sock.settimeout(None)
    limit = struct.pack("ll", int(silence_s), int(silence_s % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _acknowledge_at_once(sock: socket.socket) -> None:
    """For the next answer, as the option lasts no longer. A server that sends the head of a small answer by itself, as
    radosgw does, sends the rest only once the head is acknowledged, which the kernel would put off for 40 ms.
    """
    if hasattr(socket, "TCP_QUICKACK"):  # Linux
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


def _trusting(ca_file: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    secret = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": f"Basic {b64encode(secret.encode()).decode()}"}


def _is_readable(connection: HTTPConnection) -> bool:
    """An idle connection has nothing to say but that it ends."""
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN | select.POLLHUP | select.POLLERR)
    return bool(waiting.poll(0))


def _send(connection: HTTPConnection, request: Outgoing, line: _Line) -> bool:
    """Whether all has gone out. A server that answers early, such as by a refusal, is listened to."""
    connection.putrequest(request.method, line.target, skip_host=True, skip_accept_encoding=True)
    for name, value in {**request.headers, **line.headers}.items():
        connection.putheader(name, value)
    if request.body is not None:
        connection.putheader("Content-Length", str(sum(view.nbytes for view in request.body)))
    connection.endheaders()
    try:
        return all(_send_view(connection, view) for view in request.body or ())
    except TimeoutError:
        raise
    except OSError:
        with suppress(OSError):  # a server that refuses may close before it has read the body; its answer says why
            if _is_readable(connection):
                return False
        raise


def _send_view(connection: HTTPConnection, view: memoryview) -> bool:
    """Each piece has the whole deadline: `sendall` would have it for all of a part, however slow the way is."""
    early = isinstance(connection.sock, ssl.SSLSocket)  # tickets of TLS arrive on their own, and are no answer
    for start in range(0, view.nbytes, PIECE_BYTES):
        if start and not early and _is_readable(connection):
            return False
        with _deadline():
            connection.sock.sendall(view[start : start + PIECE_BYTES])
    return True


def _is_drained(response: HTTPResponse) -> bool:
    """Whether nothing of the answer is left in the connection. What is long or never comes is not waited for."""
    if not response.isclosed() and response.length is not None and response.length <= DRAIN_BYTES_MAX:
        with suppress(OSError, HTTPException):
            response.read(response.length + 1)
    return response.isclosed()


def read_whole(response: HTTPResponse, bytes_max: int) -> bytes | None:
    """The body, None if it has more than `bytes_max` bytes; it is then not read. `Incomplete` if it ends too early."""
    length = _length(response)
    if length is not None and length > bytes_max:
        return None
    data = response.read(bytes_max + 1 if length is None else length)
    if length is not None and len(data) < length:
        raise Incomplete(f"the answer ended after {len(data)} of {length} bytes")
    return data if len(data) <= bytes_max else None


def read_first(response: HTTPResponse, bytes_max: int) -> bytes:
    """The first `bytes_max` bytes of the body, fewer if it is shorter; `Incomplete` if it ends before its stated length."""
    length = _length(response)
    wanted = bytes_max if length is None else min(length, bytes_max)
    data = response.read(wanted)
    if length is not None and len(data) < wanted:
        raise Incomplete(f"the answer ended after {len(data)} of {length} bytes")
    return data


def read_into(response: HTTPResponse, buffer: memoryview) -> int:
    """Fill the buffer from the body, as far as it goes; `Incomplete` if it ends before its stated length."""
    count = 0
    length = _length(response)
    wanted = buffer.nbytes if length is None else min(length, buffer.nbytes)
    while count < wanted:
        read = response.readinto(buffer[count:wanted])
        if not read:
            if length is not None:
                raise Incomplete(f"the answer ended after {count} of {length} bytes")
            break
        count += read
    return count


def _length(response: HTTPResponse) -> int | None:
    """The stated length of what follows, None for pieces that end by themselves. `Incomplete` if the end could not be told
    from a broken connection.
    """
    if response.length is None and not response.chunked:
        raise Incomplete("the answer has no length")
    return response.length

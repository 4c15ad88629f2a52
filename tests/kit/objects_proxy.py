"""A proxy before a server of S3 that counts requests and injects faults, as networks and servers have them.

It runs in a thread of the test, which adds rules (`FaultProxy.on`), sets how the server is to behave (`conditions`,
`bytes_per_s`, `skew_s`, `says_yes`), or chooses a fault for each request by itself (`choose`). The header `Host` goes on
unchanged, so signatures stay valid; where a signed header is taken out, the request is signed again.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from typing import Literal, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tests.kit.objects import KEY, REGION, SECRET

PIECE_BYTES = 65_536
NO_BODY = (204, 304)
CONDITIONS = ("if-none-match", "if-match")

Conditions = Literal["honoured", "ignored", "refused", "refused but for put"]


class Answer(NamedTuple):
    """Answer this instead of forwarding the request, whose body is read."""

    status: int
    code: str


CONFLICT = Answer(409, "ConditionalRequestConflict")
PRECONDITION_FAILED = Answer(412, "PreconditionFailed")
INTERNAL_ERROR = Answer(500, "InternalError")
NOT_IMPLEMENTED = Answer(501, "NotImplemented")
SLOW_DOWN = Answer(503, "SlowDown")
FULL = Answer(507, "InsufficientStorage")
QUOTA = Answer(403, "QuotaExceeded")
ACCESS_DENIED = Answer(403, "AccessDenied")
EXPIRED_TOKEN = Answer(400, "ExpiredToken")
TIME_TOO_SKEWED = Answer(403, "RequestTimeTooSkewed")


@dataclass(frozen=True)
class LoseAnswer:
    """The server does what it is asked, and the connection breaks before its answer."""


@dataclass(frozen=True)
class CutRequest:
    """The connection breaks after so many bytes of the request's body; the server never has the whole request."""

    after_bytes: int


@dataclass(frozen=True)
class CutAnswer:
    """The connection breaks after so many bytes of the answer's body."""

    after_bytes: int


@dataclass(frozen=True)
class Stall:
    """The request is read and never answered. With `done` the server has done what it was asked."""

    done: bool = False


@dataclass(frozen=True)
class Late:
    """The connection breaks at once, and the server gets the whole request so much later."""

    delay_s: float


Fault = Answer | LoseAnswer | CutRequest | CutAnswer | Stall | Late


class Request(NamedTuple):
    """A request as it came, but for its body. Names of headers are in lower case."""

    method: str
    target: str
    version: str
    headers: dict[str, str]

    @property
    def key(self) -> str:
        """Of the object, or the prefix of a list."""
        return unquote(urlsplit(self.target).path).lstrip("/").partition("/")[2] or self.query.get("prefix", "")

    @property
    def query(self) -> dict[str, str]:
        found = parse_qs(urlsplit(self.target).query, keep_blank_values=True)
        return {name: values[0] for name, values in found.items()}

    @property
    def kind(self) -> str:
        """What is asked for, in a word."""
        query, copies = self.query, "x-amz-copy-source" in self.headers
        if "partNumber" in query:
            return {"PUT": "copy-part" if copies else "part"}.get(self.method, "other")
        if "uploadId" in query:
            return {"POST": "complete", "DELETE": "abort", "GET": "parts"}.get(self.method, "other")
        if "uploads" in query:
            return {"POST": "begin", "GET": "uploads"}.get(self.method, "other")
        if "delete" in query:
            return "deletes"
        if self.method == "GET" and ("list-type" in query or not self.key or "prefix" in query):
            return "list"
        if self.method == "PUT":
            return "copy" if copies else "put"
        return {"GET": "get", "HEAD": "head", "DELETE": "delete"}.get(self.method, "other")

    @property
    def conditional(self) -> bool:
        return any(name in self.headers for name in CONDITIONS)

    def head(self) -> bytes:
        lines = [
            f"{self.method} {self.target} {self.version}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Seen(NamedTuple):
    """A request that came, what was done to it, and the server's status; 0 where none was asked or had answered."""

    kind: str
    key: str
    conditional: bool
    fault: Fault | None
    status: int


class Rule:
    """Faults for requests of a kind and key: for `times` of them from the `nth` on. `hits` says for how many so far."""

    def __init__(self, fault: Fault, kind: str, key: str, nth: int, times: int | None) -> None:
        self.fault, self._kind, self._key, self._nth, self._times = fault, kind, re.compile(key), nth, times
        self.matched = self.hits = 0

    def applies(self, request: Request) -> bool:
        if self._kind not in ("", request.kind) or not self._key.search(request.key):
            return False
        self.matched += 1
        if self.matched < self._nth or (self._times is not None and self.hits >= self._times):
            return False
        self.hits += 1
        return True


class FaultProxy:
    """Forwards requests to the server at `endpoint`; `endpoint` of its own is what clients are told."""

    def __init__(self, endpoint: str) -> None:
        address = urlsplit(endpoint)
        assert address.hostname is not None and address.port is not None
        self._host, self._port = address.hostname, address.port
        self.conditions: Conditions = "honoured"
        self.says_yes = False  # 200 to everything, and nothing is done
        self.bytes_per_s: float | None = None
        self.skew_s = 0.0  # of the header Date of answers
        self.choose: Callable[[Request], Fault | None] = lambda request: None  # after the rules
        self.seen: list[Seen] = []
        self._rules: list[Rule] = []
        self._connections: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Future[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._link = asyncio.Lock()
        self._released = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name="fault-proxy", daemon=True)
        self._thread.start()
        started.wait()

    def on(self, fault: Fault, kind: str = "", key: str = "", *, nth: int = 1, times: int | None = 1) -> Rule:
        """Add a rule. `kind` is one of `Request.kind`, empty for all; `key` is a pattern that is searched for."""
        rule = Rule(fault, kind, key, nth, times)
        self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget rules and ways to behave; stalled requests go on to their end without an answer."""
        self._rules, self.choose = [], lambda request: None
        self.conditions, self.says_yes, self.bytes_per_s, self.skew_s = "honoured", False, None, 0.0
        self.release()

    def release(self) -> None:
        """End requests that are stalled now: their connections break."""

        def go() -> None:
            self._released.set()
            self._released = asyncio.Event()

        self._loop.call_soon_threadsafe(go)

    def settle(self) -> None:
        """Return when the server has answered all that it has been asked so far, or will be asked late, wherever the answer
        goes.
        """

        async def all_answered() -> None:
            if self._asking:
                await asyncio.wait([*self._asking])

        asyncio.run_coroutine_threadsafe(all_answered(), self._loop).result()

    def reset(self) -> None:
        """Break every connection."""
        asyncio.run_coroutine_threadsafe(self._reset(), self._loop).result()

    def refuse(self) -> None:
        """Break every connection, and accept no other one until `accept`."""

        self._loop.call_soon_threadsafe(self._server.close)
        self.reset()

    def accept(self) -> None:
        """Accept connections again, at the same address."""
        asyncio.run_coroutine_threadsafe(self._listen(urlsplit(self.endpoint).port or 0), self._loop).result()

    def kinds(self, key: str = "") -> Counter[str]:
        """How many requests of each kind came so far, of the keys with this pattern."""
        return Counter(one.kind for one in self.seen if re.search(key, one.key))

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Requests of a block by kind, filled in at its end."""
        before, counts = len(self.seen), Counter[str]()
        yield counts
        counts.update(one.kind for one in self.seen[before:])

    def close(self) -> None:
        self.release()
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)

        self._loop.run_until_complete(self._listen(0))
        started.set()
        self._loop.run_forever()

    async def _listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _stop(self) -> None:
        self._server.close()
        await self._reset()

    async def _reset(self) -> None:
        tasks = [*self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._pass_one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one of the two is gone, or the proxy ends
        finally:
            self._connections.discard(task)
            _break(writer)

    async def _pass_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read a request, and answer it; False where the connection is at its end."""
        head = await reader.readuntil(b"\r\n\r\n")
        request, body = _parse(head), _Body(reader)
        body.left = int(request.headers.get("content-length", 0))
        if request.headers.pop("expect", None):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        fault = next((rule.fault for rule in self._rules if rule.applies(request)), None)
        if fault is None:
            fault = self.choose(request)
        if fault is None and request.conditional and self._refuses(request):
            fault = NOT_IMPLEMENTED
        if self.conditions == "ignored" and request.conditional:
            request = _without_conditions(request)
        position = len(self.seen)
        self.seen.append(Seen(request.kind, request.key, request.conditional, fault, 0))

        def answered(status: int) -> None:
            self.seen[position] = self.seen[position]._replace(status=status)

        return await _Exchange(self, request, body, writer, answered).end_by(fault)

    def _refuses(self, request: Request) -> bool:
        return self.conditions == "refused" or (self.conditions == "refused but for put" and request.kind != "put")

    async def slowly(self, size: int) -> None:
        """All connections share the link."""
        if self.bytes_per_s is not None:
            async with self._link:
                await asyncio.sleep(size / self.bytes_per_s)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """The server is asked something in this block."""
        answered = self._loop.create_future()
        self._asking.add(answered)
        try:
            yield
        finally:
            self._asking.discard(answered)
            answered.set_result(None)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port)

    async def released(self) -> None:
        await self._released.wait()


class _Body:
    """What is left to read of a request's body."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self.left = reader, 0

    async def read(self) -> bytes:
        """The next piece; empty at its end."""
        piece = await self._reader.read(min(PIECE_BYTES, self.left)) if self.left else b""
        if self.left and not piece:
            raise asyncio.IncompleteReadError(b"", self.left)
        self.left -= len(piece)
        return piece

    async def whole(self) -> bytes:
        return b"".join([piece async for piece in self])

    def __aiter__(self) -> _Body:
        return self

    async def __anext__(self) -> bytes:
        piece = await self.read()
        if not piece:
            raise StopAsyncIteration
        return piece


class _Exchange:
    """One request and its answer."""

    def __init__(
        self,
        proxy: FaultProxy,
        request: Request,
        body: _Body,
        client: asyncio.StreamWriter,
        answered: Callable[[int], None],
    ) -> None:
        self._proxy, self._request, self._body, self._client, self._answered = proxy, request, body, client, answered

    async def end_by(self, fault: Fault | None) -> bool:
        """Whether the connection may be used for another request."""
        if isinstance(fault, Answer) or self._proxy.says_yes:
            await self._body.whole()
            await self._answer(fault if isinstance(fault, Answer) else Answer(200, ""))
            return True
        if isinstance(fault, Late):
            whole = await self._body.whole()
            with self._proxy.asking():
                _break(self._client)
                await asyncio.sleep(fault.delay_s)
                await self._ask(whole)
            return False
        if isinstance(fault, LoseAnswer) or fault == Stall(done=True):
            with self._proxy.asking():
                await self._ask(await self._body.whole())
            if isinstance(fault, Stall):
                await self._proxy.released()
            return False
        if isinstance(fault, Stall):
            await self._proxy.released()
            return False
        with self._proxy.asking():
            if isinstance(fault, CutRequest):
                await self._cut(fault.after_bytes)
                return False
            return await self._forward(fault.after_bytes if fault is not None else None)

    async def _answer(self, said: Answer) -> None:
        text = f"<Error><Code>{said.code}</Code><Message>injected</Message></Error>" if said.code else ""
        body = b"" if self._request.method == "HEAD" else text.encode()
        lines = [f"HTTP/1.1 {said.status} Injected", f"Content-Length: {len(body)}", "Content-Type: application/xml"]
        lines += [f"Date: {formatdate(usegmt=True)}", 'ETag: "d41d8cd98f00b204e9800998ecf8427e"']
        self._answered(said.status)
        self._client.write(("\r\n".join(self._dated(lines)) + "\r\n\r\n").encode() + body)
        await self._client.drain()

    def _dated(self, lines: list[str]) -> list[str]:
        return [_skewed(line, self._proxy.skew_s) for line in lines] if self._proxy.skew_s else lines

    async def _ask(self, whole: bytes) -> None:
        """Have the server do it, whether its answer is wanted or not."""
        reader, writer = await self._proxy.connect()
        try:
            writer.write(self._request.head() + whole)
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
            self._answered(_status(head))
            # The status may be there before the work is done, as of a Complete.
            async for _ in _answer_body(reader, head, self._request.method):
                pass
        finally:
            writer.close()

    async def _cut(self, after_bytes: int) -> None:
        _, writer = await self._proxy.connect()
        writer.write(self._request.head())
        with suppress(OSError):
            async for piece in self._body:
                writer.write(piece[:after_bytes])
                after_bytes -= len(piece)
                await writer.drain()
                if after_bytes <= 0:
                    break
        _break(writer)

    async def _forward(self, cut_after: int | None) -> bool:
        reader, writer = await self._proxy.connect()
        sending = asyncio.ensure_future(self._send(writer))
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self._answered(_status(head))
            # A server may answer before it has read all: what is left is read to no end, or the client would not see it.
            sending.cancel()
            with suppress(asyncio.CancelledError, OSError):
                await sending
            await self._body.whole()
            lines = [line for line in _lines(head) if not line.lower().startswith("connection:")]
            self._client.write(("\r\n".join(self._dated(lines)) + "\r\n\r\n").encode("latin-1"))
            async for piece in _answer_body(reader, head, self._request.method):
                sent = piece if cut_after is None else piece[:cut_after]
                self._client.write(sent)
                await self._client.drain()
                await self._proxy.slowly(len(sent))
                if cut_after is not None:
                    cut_after -= len(sent)
                    if len(sent) < len(piece):
                        break
            return cut_after is None and _has_end(head, self._request.method)
        finally:
            sending.cancel()
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        writer.write(self._request.head())
        async for piece in self._body:
            writer.write(piece)
            await writer.drain()
            await self._proxy.slowly(len(piece))


async def _answer_body(reader: asyncio.StreamReader, head: bytes, method: str) -> AsyncIterator[bytes]:
    """An answer's body as it stands on the wire, chunked or not."""
    status = _status(head)
    if method == "HEAD" or status in NO_BODY:
        return
    length = re.search(rb"\r\ncontent-length: *(\d+)", head, re.IGNORECASE)
    if length is None and re.search(rb"\r\ntransfer-encoding: *chunked", head, re.IGNORECASE):
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line + await reader.readexactly(size + 2)
            if size == 0:
                return
    left = int(length[1]) if length is not None else -1
    while left:
        piece = await reader.read(PIECE_BYTES if left < 0 else min(PIECE_BYTES, left))
        if not piece:
            if left > 0:
                raise asyncio.IncompleteReadError(b"", left)
            return
        left -= len(piece) if left > 0 else 0
        yield piece


def _parse(head: bytes) -> Request:
    first, *lines = _lines(head)
    method, target, version = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(method, target, version, headers | {"connection": "close"})  # to the server each has its own


def _lines(head: bytes) -> list[str]:
    return head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")


def _has_end(head: bytes, method: str) -> bool:
    """Whether an answer ends otherwise than with its connection."""
    framed = re.search(rb"\r\n(content-length|transfer-encoding):", head, re.IGNORECASE)
    return head.startswith(b"HTTP/1.1") and (framed is not None or method == "HEAD" or _status(head) in NO_BODY)


def _status(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])


def _without_conditions(request: Request) -> Request:
    """Signed again: a header of a condition is one of those that a signature covers."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    class Again(S3SigV4Auth):
        def payload(self, request: AWSRequest) -> str:
            return digest

    digest = request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD")
    left = {
        name: value for name, value in request.headers.items() if name not in (*CONDITIONS, "authorization", "x-amz-date")
    }
    again = AWSRequest(request.method, f"http://{request.headers['host']}{request.target}", left)
    Again(Credentials(KEY, SECRET), "s3", REGION).add_auth(again)
    return request._replace(headers={name.lower(): value for name, value in again.headers.items()})


def _skewed(line: str, skew_s: float) -> str:
    name, _, value = line.partition(":")
    if name.lower() != "date":
        return line
    return f"{name}: {formatdate(parsedate_to_datetime(value.strip()).timestamp() + skew_s, usegmt=True)}"


def _break(writer: asyncio.StreamWriter) -> None:
    """Reset a connection: the other side must not take its end for that of an answer."""
    with suppress(OSError, AttributeError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@contextmanager
def faulty(endpoint: str) -> Iterator[FaultProxy]:
    """A proxy to a server for the length of a block."""
    proxy = FaultProxy(endpoint)
    try:
        yield proxy
    finally:
        proxy.close()

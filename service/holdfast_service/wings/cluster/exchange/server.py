"""Serves the bytes of slots to other nodes, at an address of its own, to clients that prove to know its secret.

A round's slots are offered while it is being written: free slots may be filled again. Those of an in-memory checkpoint are
free. They are not locked for another node, which might hang: digested bytes are sent if the slot was unchanged afterwards,
and bytes overwritten while being sent do not match their digest.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any, NamedTuple, cast

import msgspec

from holdfast_formats.digest import DIGITS, digest
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.daemon.arena.memory_checkpoints import LentSlot, MemoryStep
from holdfast_service.wings.cluster.exchange import memory_requests, proofs
from holdfast_service.wings.cluster.exchange import ranges as wanted
from holdfast_service.wings.cluster.exchange.proofs import AnswerProof

log = logging.getLogger(__name__)

SILENCE_S = 60.0  # of a client that sends or receives
LINGER_S = 1.0  # for what a refused node still sends
READ_BYTES = 2**16
STRANGERS_MAX = 256  # connections at once that have proven nothing; of more, the oldest one is ended
_PATH = re.compile(re.escape(wanted.PATH).replace(r"\{\}", r"([1-9]\d{0,18})"))


class _Gone(Exception):
    """A held slot has been reused."""


class _Answer(NamedTuple):
    """Ranges of slots, valid as long as they are `still` unchanged."""

    slots: Mapping[int, memoryview]
    ranges: Sequence[SlotRange]
    is_still: Callable[[int], bool]

    def write(self, to: BufferedIOBase, prove: AnswerProof) -> None:
        """Send them. Raises `_Gone` if a slot has changed: the response is cut short."""
        for one in self.ranges:
            for begin, end in wanted.chunks(one.begin, one.end):
                part = self.slots[one.rank][begin:end]
                proof = prove.chunk(digest(part)).encode()
                if not self.is_still(one.rank):
                    raise _Gone(f"the slot of rank {one.rank}")
                to.write(part)
                to.write(proof)


class ExchangeServer:
    """Listens from the start. Thread-safe."""

    def __init__(
        self,
        host: str,
        port: int = 0,
        lent: Callable[[MemoryStep], Sequence[LentSlot]] = lambda of: (),
        secrets: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        """`lent` is what this node holds of a save in memory. Clients must know one of the `secrets`, the newest one first:
        without one, none is answered.
        """
        self.secrets, self.lent = secrets, lent
        self._offers: dict[int, Mapping[int, memoryview]] = {}
        self._lock = threading.Lock()
        self._listening = _Listening(self, host, port)

    def move_to(self, host: str) -> None:
        """Listen at another address of this machine from now on; `OSError`, without a change, if that fails."""
        before, self._listening = self._listening, _Listening(self, host, 0)
        before.close()

    @property
    def url(self) -> str:
        host, port = self._listening.server.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}"

    def offer(self, round_id: int, slots: Mapping[int, memoryview]) -> None:
        """Let the nodes of this round read the slots of these ranks."""
        with self._lock:
            self._offers[round_id] = slots

    def withdraw(self, round_id: int) -> None:
        with self._lock:
            self._offers.pop(round_id, None)

    def offered(self, round_id: int) -> Mapping[int, memoryview] | None:
        with self._lock:
            return self._offers.get(round_id)

    def still_offers(self, slots: Mapping[int, memoryview]) -> bool:
        """Whether bytes read from these slots so far are the offered ones: slots are freed only after `withdraw`."""
        with self._lock:
            return any(offered is slots for offered in self._offers.values())

    def close(self) -> None:
        self._listening.close()


class _Listening:
    def __init__(self, exchange: ExchangeServer, host: str, port: int) -> None:
        self.server = (_Server6 if ":" in host else _Server)(host, port, exchange)
        self._thread = threading.Thread(target=self.server.serve_forever, name="holdfast-exchange", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, exchange: ExchangeServer) -> None:
        self.exchange = exchange
        self._strangers: dict[socket.socket, None] = {}  # oldest first
        self._lock = threading.Lock()
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Limits connections without a known secret, because each has a thread and a descriptor."""
        with self._lock:
            self._strangers[request] = None
            oldest = next(iter(self._strangers)) if len(self._strangers) > STRANGERS_MAX else None
            if oldest is not None:
                del self._strangers[oldest]
        if oldest is not None:
            with suppress(OSError):  # it has ended by itself
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def knows(self, request: Any) -> None:
        """The client has authenticated, or is gone."""
        with self._lock:
            self._strangers.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.knows(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        if isinstance(sys.exc_info()[1], _Gone):
            log.info("stopped answering a node at %s: %s was reused", client_address, sys.exc_info()[1])
            return
        log.info("the reply to a node at %s was cut off", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    """A connection: one nonce, and the requests authenticated by it."""

    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S
    disable_nagle_algorithm = True
    server_version, sys_version = "holdfast", ""

    def setup(self) -> None:
        super().setup()
        self._nonce, self._asked = "", 0  # the nonce is good for this connection alone

    def do_POST(self) -> None:
        if self.path == proofs.CHALLENGE_PATH:
            self._challenge()
            return
        prove = self._proven()
        if prove is None:
            self._refuse(HTTPStatus.UNAUTHORIZED, "")
            return
        asked = self._answered()
        if isinstance(asked, HTTPStatus):
            self._refuse(asked, prove.head(asked, 0))
        elif isinstance(asked, bytes):
            self._begin("application/json", len(asked) + DIGITS, prove)
            self.wfile.write(asked + prove.chunk(digest(asked)).encode())
        else:
            self._begin("application/octet-stream", wanted.answer_bytes(asked.ranges), prove)
            asked.write(self.wfile, prove)

    def _challenge(self) -> None:
        """Start with a new challenge on this connection."""
        if self.headers.get("Content-Length", "0") != "0":
            self._refuse(HTTPStatus.BAD_REQUEST, "")
            return
        self._nonce, self._asked = proofs.new_nonce(), 0
        self._begin("text/plain", len(self._nonce))
        self.wfile.write(self._nonce.encode())

    def _begin(self, kind: str, length: int, prove: AnswerProof | None = None) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(length))
        if prove is not None:
            self.send_header(proofs.PROOF_HEADER, prove.head(HTTPStatus.OK, length))
        self.end_headers()

    def _proven(self) -> AnswerProof | None:
        """The proofs of the response; None for a client that has not authenticated as a node of the cluster."""
        if not self._nonce:
            return None
        server = cast(_Server, self.server)
        self._asked += 1
        stated = self.headers.get(proofs.BODY_HEADER, "")
        asked = proofs.NodeQuestion(server.exchange.url, self._nonce, self._asked, self.path, stated)
        prove = asked.check(self.headers.get("Authorization", ""), server.exchange.secrets())
        if prove is not None:
            server.knows(self.connection)
        return prove

    def _answered(self) -> _Answer | bytes | HTTPStatus:
        """The requested content, or why it is refused."""
        known = _PATH.fullmatch(self.path) is not None or self.path in (
            memory_requests.SLOTS_PATH,
            memory_requests.BYTES_PATH,
        )
        length = self.headers.get("Content-Length", "")
        if not known or not length.isascii() or not length.isdigit() or int(length) > wanted.REQUEST_BYTES_MAX:
            return HTTPStatus.BAD_REQUEST
        body = self.rfile.read(int(length))
        if proofs.body_digest(body) != self.headers.get(proofs.BODY_HEADER, ""):
            return HTTPStatus.BAD_REQUEST
        return _found(cast(_Server, self.server).exchange, self.path, body)

    def _refuse(self, status: HTTPStatus, proof: str) -> None:
        self.close_connection = True  # what it sent is not read
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.send_header(proofs.PROOF_HEADER, proof)
        self.send_header("Connection", "close")
        self.end_headers()
        self._linger()

    def _linger(self) -> None:
        """Read what still arrives for a moment: closing a connection with unread bytes resets it, and the response may be
        lost (RFC 9112, section 9.6).
        """
        until = time.monotonic() + LINGER_S
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            while (left_s := until - time.monotonic()) > 0:
                self.connection.settimeout(left_s)
                if not self.connection.recv(READ_BYTES):
                    return

    def log_message(self, format: str, *values: object) -> None:
        log.debug(format, *values)


def _found(exchange: ExchangeServer, path: str, body: bytes) -> _Answer | bytes | HTTPStatus:
    of_round = _PATH.fullmatch(path)
    if of_round is None:
        return (
            _slot_reports(body, exchange.lent) if path == memory_requests.SLOTS_PATH else _held_ranges(body, exchange.lent)
        )
    offered = exchange.offered(int(of_round[1]))
    if offered is None:
        return HTTPStatus.CONFLICT
    ranges = _checked(body, offered)
    return (
        HTTPStatus.BAD_REQUEST if ranges is None else _Answer(offered, ranges, lambda rank: exchange.still_offers(offered))
    )


def _checked(body: bytes, offered: Mapping[int, memoryview]) -> Sequence[SlotRange] | None:
    """The requested ranges; None unless all are inside the offered slots."""
    try:
        asked = wanted.decode_asked(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    ranges = [SlotRange(*one) for one in asked.ranges]
    inside = all(one.rank in offered and 0 <= one.begin < one.end <= len(offered[one.rank]) for one in ranges)
    return ranges if inside else None


def _slot_reports(body: bytes, lent: Callable[[MemoryStep], Sequence[LentSlot]]) -> bytes | HTTPStatus:
    """The slots of the requested save that are here."""
    try:
        asked = memory_requests.decode_slots_asked(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return HTTPStatus.BAD_REQUEST
    return memory_requests.encode_slots(
        [memory_requests.SlotReport(s.rank, s.table_digest, s.table_at, s.data_bytes, s.table_bytes) for s in lent(asked.of)]
    )


def _held_ranges(body: bytes, lent: Callable[[MemoryStep], Sequence[LentSlot]]) -> _Answer | HTTPStatus:
    """Requested ranges of held slots, if they are the intended ones, and inside the ranks' data."""
    try:
        asked = memory_requests.decode_ranges_asked(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return HTTPStatus.BAD_REQUEST
    slots = {slot.rank: slot for slot in lent(asked.of)}
    if any(rank not in slots or slots[rank].table_digest != stated for rank, stated in asked.tables.items()):
        return HTTPStatus.CONFLICT
    ranges = [SlotRange(*one) for one in asked.ranges]
    if not all(one.rank in asked.tables and slots[one.rank].has(one.begin, one.end) for one in ranges):
        return HTTPStatus.BAD_REQUEST
    return _Answer({rank: slot.memory for rank, slot in slots.items()}, ranges, lambda rank: slots[rank].is_still())

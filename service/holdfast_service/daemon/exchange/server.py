"""Serves the bytes of slots to other nodes, at an address of its own, to who knows the cluster's secret.

A round's slots are offered while it is being written, and only then: a slot that is free may be filled anew.
"""

from __future__ import annotations

import hmac
import logging
import re
import socket
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from holdfast_formats.digest import digest
from holdfast_formats.staging.slot_ranges import SlotRange
from holdfast_service.daemon.exchange import ranges as wanted

log = logging.getLogger(__name__)

SILENCE_S = 60.0  # of a node that asks, or takes what it asked for
_PATH = re.compile(re.escape(wanted.PATH).replace(r"\{\}", r"([1-9]\d{0,18})"))


class ExchangeServer:
    """Listens from the start. `secret` is what who asks has to know; nobody is answered before it is set. Thread-safe."""

    def __init__(self, host: str, port: int = 0) -> None:
        self.secret = ""
        self._offers: dict[int, Mapping[int, memoryview]] = {}
        self._lock = threading.Lock()
        self._server = (_Server6 if ":" in host else _Server)((host, port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, name="holdfast-exchange", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        host, port = self._server.server_address[:2]
        return f"http://{f'[{host!s}]' if ':' in str(host) else host!s}:{port}"

    def offer(self, round_id: int, slots: Mapping[int, memoryview]) -> None:
        """From now on the slots of these ranks may be read by the nodes of this round."""
        with self._lock:
            self._offers[round_id] = slots

    def withdraw(self, round_id: int) -> None:
        """The round has ended."""
        with self._lock:
            self._offers.pop(round_id, None)

    def offered(self, round_id: int) -> Mapping[int, memoryview] | None:
        with self._lock:
            return self._offers.get(round_id)

    def still_offers(self, slots: Mapping[int, memoryview]) -> bool:
        """Whether what was read of these slots until now is what was offered: they are free only once it is withdrawn."""
        with self._lock:
            return any(offered is slots for offered in self._offers.values())

    def is_known(self, authorization: str) -> bool:
        """Whether this is what a node of the cluster says."""
        stated = f"Bearer {self.secret}".encode()
        return bool(self.secret) and hmac.compare_digest(authorization.encode(errors="replace"), stated)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        log.info("a node at %s was not answered to the end", client_address, exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _handler(exchange: ExchangeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = SILENCE_S
        disable_nagle_algorithm = True
        server_version, sys_version = "holdfast", ""

        def do_POST(self) -> None:
            asked = self._asked()
            if isinstance(asked, HTTPStatus):
                self._refuse(asked)
                return
            offered, found = asked
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(wanted.answer_bytes(found)))
            self.end_headers()
            for one in found:
                for begin, end in wanted.chunks(one.begin, one.end):
                    part = offered[one.rank][begin:end]
                    self.wfile.write(part)
                    proof = digest(part).encode()
                    if not exchange.still_offers(offered):  # other bytes may be there by now: they get no digest
                        self.close_connection = True
                        return
                    self.wfile.write(proof)

        def _asked(self) -> tuple[Mapping[int, memoryview], Sequence[SlotRange]] | HTTPStatus:
            """The slots of the round, and what is asked for of them; else why that is not answered."""
            if not exchange.is_known(self.headers.get("Authorization", "")):
                return HTTPStatus.UNAUTHORIZED
            path = _PATH.fullmatch(self.path)
            length = self.headers.get("Content-Length", "")
            if path is None or not length.isascii() or not length.isdigit() or int(length) > wanted.REQUEST_BYTES_MAX:
                return HTTPStatus.BAD_REQUEST
            body = self.rfile.read(int(length))
            offered = exchange.offered(int(path[1]))
            if offered is None:
                return HTTPStatus.CONFLICT
            found = _checked(body, offered)
            return HTTPStatus.BAD_REQUEST if found is None else (offered, found)

        def _refuse(self, status: HTTPStatus) -> None:
            self.close_connection = True  # what it sent is not read
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, format: str, *values: object) -> None:
            log.debug(format, *values)

    return Handler


def _checked(body: bytes, offered: Mapping[int, memoryview]) -> Sequence[SlotRange] | None:
    """What is asked for; None unless all of it is inside the slots that are offered."""
    try:
        asked = wanted.decode_asked(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    found = [SlotRange(*one) for one in asked.ranges]
    inside = all(one.rank in offered and 0 <= one.begin < one.end <= len(offered[one.rank]) for one in found)
    return found if inside else None

"""The HTTP server, bounded: a limit of connections, of the time and size of a request's head, and errors that are problems.
Idle connections lock no client out.

uvicorn closes what is idle between two requests; but it waits for ever for a head, or for the rest of a body that has been
answered already, that comes a byte at a time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from collections import Counter

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from holdfast_formats.errors import CheckpointError, DaemonGone, InvalidRequest
from holdfast_formats.rest.access import ALL
from holdfast_service.api.access.admission import NO_PEER, answering
from holdfast_service.api.access.request_head import HEAD_BYTES_MAX
from holdfast_service.api.problems import MEDIA_TYPE, TransferAborted
from holdfast_service.control.database.visible import limited_to

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
HEAD_WAIT_MAX_S = 20.0
_REASONS = {400: "Bad Request", 503: "Service Unavailable"}


class _Unexpected(logging.Filter):
    """Drops uvicorn's errors of connections that this service has cut, and logged already."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], TransferAborted))


_UNEXPECTED = _Unexpected()


class FromOutside:
    """ASGI: resets the context of every request.

    asyncio hands a request the context of an earlier one: of the request before it in the pipeline, or of one whose body
    made the connection wait. By its context the access check identifies API requests that a page sends for an incoming
    request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with answering(NO_PEER), limited_to(ALL):
            await self._app(scope, receive, send)


def server(app: ASGIApp, log_level: str = "warning") -> uvicorn.Server:
    """A server of this application, for any sockets."""
    logging.getLogger("uvicorn.error").addFilter(_UNEXPECTED)
    return uvicorn.Server(
        uvicorn.Config(
            FromOutside(app),
            http=LimitedConnection,
            ws="none",
            lifespan="off",
            log_level=log_level,
            log_config=None,  # its lines are ours: `logs` shapes them
            access_log=False,
            server_header=False,
            proxy_headers=False,  # trusted proxies would have to be configured; peers are for the log alone
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
    )


def connections_max() -> int:
    """Half of the descriptors of this process: files, ranks and the catalog need the others."""
    return min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class LimitedConnection(H11Protocol):
    """One connection. It ends when it waits too long for the head of a request."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > connections_max() and not self._make_room():
            log.warning("connection from %s refused: %d connections are open", self.client, len(self.connections) - 1)
            self._end_with(DaemonGone("too many connections are open", hint="try again in a moment"))
            return
        self._wait_for_head()

    def _make_room(self) -> bool:
        """Close the longest waiting connection of the address that has the most."""
        waiting = [
            one
            for one in self.connections
            if isinstance(one, LimitedConnection) and one is not self and one._late is not None
        ]
        counts = Counter(one._address for one in waiting)
        if not waiting:
            return False
        given_up = min(waiting, key=lambda one: (-counts[one._address], one._late.when() if one._late is not None else 0.0))
        log.info("closed the connection from %s to make room for a new one: it sent no request", given_up.client)
        given_up._stop_waiting()
        given_up.transport.abort()
        return True

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        self._wait_for_head()
        super().on_response_complete()
        if not self.cycle.response_complete:  # the next request had come already
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with a problem too."""
        self._end_with(InvalidRequest("this is not an HTTP/1.1 request", hint="send HTTP/1.1, with a shorter request head"))

    def _end_with(self, error: CheckpointError) -> None:
        body = json.dumps(error.problem()).encode()
        head = (
            f"HTTP/1.1 {error.status} {_REASONS[error.status]}\r\nContent-Type: {MEDIA_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._late = self.loop.call_later(HEAD_WAIT_MAX_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        log.info("%s did not send a request in %.0f s", self.client, HEAD_WAIT_MAX_S)
        self.transport.abort()

"""Requests that last, and the tokens by which they were let in: each ends within a second of its token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection

import anyio
import anyio.to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_formats.errors import CheckpointError, Unauthenticated
from holdfast_service.api.problems import TransferAborted

log = logging.getLogger(__name__)

ASK_EVERY_S = 0.4


class Lasting:
    """The requests that are being answered by token. One question a moment tells which of these are in force, for all."""

    def __init__(self, in_force: Callable[[Collection[int]], set[int]]) -> None:
        self._in_force = in_force
        self._open: dict[anyio.CancelScope, int] = {}
        self._watch: asyncio.Task[None] | None = None
        self._thread = anyio.CapacityLimiter(1)  # its own: it does not wait behind what it is there to end

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, token: int) -> None:
        """Have the request answered while the token is in force. Raises `Unauthenticated` if it ends before an answer has
        begun, and `TransferAborted`, which cuts the connection, behind that."""
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        with anyio.CancelScope() as limit:
            self._open[limit] = token
            if self._watch is None:
                self._watch = asyncio.get_running_loop().create_task(self._look())
            try:
                await app(scope, receive, noted)
            finally:
                del self._open[limit]
        if limit.cancelled_caught:
            log.info("%s %s was ended together with its token", scope["method"], scope["path"])
            if begun:
                raise TransferAborted(f"{scope['path']}: the token was revoked or expired during the request")
            raise Unauthenticated("the token was revoked or expired during the request", hint="use another token")

    async def _look(self) -> None:
        try:
            while self._open:
                await asyncio.sleep(ASK_EVERY_S)
                asked = set(self._open.values())
                try:
                    still = await anyio.to_thread.run_sync(self._in_force, asked, limiter=self._thread) if asked else asked
                except CheckpointError as error:  # nobody revokes anything in a catalog that is away; asked again
                    log.warning("cannot check whether tokens are still valid: %s", error.detail)
                    continue
                for limit, token in list(self._open.items()):
                    if token in asked - still:
                        limit.cancel()
        finally:
            self._watch = None

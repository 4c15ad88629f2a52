"""A limit on how long a client may stall while it occupies a connection."""

from __future__ import annotations

import logging

import anyio
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_service.api.problems import TransferAborted

log = logging.getLogger(__name__)

STALL_MAX_S = 120.0


class StallLimit:
    """Cuts the connection of a client that has accepted no part of a body for so long."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            with anyio.move_on_after(STALL_MAX_S) as limit:
                await send(message)
            if limit.cancelled_caught:
                why = f"{scope['path']}: the client read nothing for {STALL_MAX_S:.0f} s"
                log.info("transfer cut off: %s", why)
                raise TransferAborted(why)

        await self._app(scope, receive, send_in_time)

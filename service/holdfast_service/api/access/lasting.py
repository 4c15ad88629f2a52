"""Requests that last, and the tokens and sessions by which they were let in: each ends within a second of these."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import anyio
import anyio.to_thread
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast_formats.errors import CheckpointError, Unauthenticated
from holdfast_service.api.problems import TransferAborted

log = logging.getLogger(__name__)

ASK_EVERY_S = 0.4
_ENDED = "the token was revoked or expired, or the session was signed out, during the request"


class Stay(NamedTuple):
    """By what a request was let in: a token, and the browser's session that stands for one. The owner has no token here."""

    token: int | None = None
    session: str | None = None


class Lasting:
    """The requests that are being answered by token. One question a moment tells which of these are in force, for all."""

    def __init__(
        self,
        tokens_in_force: Callable[[Collection[int]], set[int]],
        sessions_in_force: Callable[[Collection[str]], set[str]],
    ) -> None:
        self._tokens_in_force, self._sessions_in_force = tokens_in_force, sessions_in_force
        self._open: dict[anyio.CancelScope, Stay] = {}
        self._watch: asyncio.Task[None] | None = None
        self._thread = anyio.CapacityLimiter(1)  # its own: it does not wait behind what it is there to end

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, stay: Stay) -> None:
        """Have the request answered while its token and session are in force. Raises `Unauthenticated` if one ends before
        an answer has begun, and `TransferAborted`, which cuts the connection, behind that.
        """
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        with anyio.CancelScope() as limit:
            self._open[limit] = stay
            if self._watch is None:
                self._watch = asyncio.get_running_loop().create_task(self._look())
            try:
                await app(scope, receive, noted)
            finally:
                del self._open[limit]
        if limit.cancelled_caught:
            log.info("%s %s was ended together with its token", scope["method"], scope["path"])
            if begun:
                raise TransferAborted(f"{scope['path']}: {_ENDED}")
            raise Unauthenticated(_ENDED, hint="sign in again, or use another token")

    async def _look(self) -> None:
        try:
            while self._open:
                await asyncio.sleep(ASK_EVERY_S)
                asked = list(self._open.items())
                sessions = {stay.session for _, stay in asked if stay.session is not None}
                over = sessions - self._sessions_in_force(sessions)
                _end(limit for limit, stay in asked if stay.session in over)
                tokens = {stay.token for _, stay in asked if stay.token is not None}
                if not tokens:
                    continue
                try:
                    ended = tokens - await anyio.to_thread.run_sync(self._tokens_in_force, tokens, limiter=self._thread)
                except CheckpointError as error:  # nobody revokes anything in a catalog that is away; asked again
                    log.warning("cannot check whether tokens are still valid: %s", error.detail)
                    continue
                _end(limit for limit, stay in asked if stay.token in ended and limit in self._open)
        finally:
            self._watch = None


def _end(limits: Iterable[anyio.CancelScope]) -> None:
    for limit in limits:
        limit.cancel()

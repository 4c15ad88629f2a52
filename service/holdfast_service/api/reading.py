"""Requests as readers: what a request has opened stays until its last byte has left, and a while longer for the next one."""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_service.control.readers import LINGER_S, Readers

_WHAT = "HTTP"
_held: ContextVar[ExitStack | None] = ContextVar("held", default=None)


class HeldWhileSending:
    """Middleware: every request has a stack of holds, which ends with its response, however that ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with ExitStack() as held:
            before = _held.set(held)
            try:
                await self._app(scope, receive, send)
            finally:
                _held.reset(before)


def hold(readers: Readers, run: str, step: int) -> None:
    """Nothing removes this checkpoint until the present request has been answered; `NoSuchCheckpoint` if it is too late."""
    held = _held.get()
    if held is None:
        readers.hold(run, step, _WHAT, LINGER_S)
    else:
        held.enter_context(readers.reading(run, step, _WHAT, LINGER_S))

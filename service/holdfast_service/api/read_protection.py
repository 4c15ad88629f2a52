"""Protects checkpoints from removal while requests read them, and a while longer for a program's next request.

A page's requests come from within the page's own request. They hold nothing afterwards: looking at a checkpoint does not
keep it from being removed.
"""

from __future__ import annotations

from contextlib import ExitStack
from contextvars import ContextVar

from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast_formats.errors import Damaged
from holdfast_service.control.checkpoints.readers import LINGER_S, OPENED, Readers

_held: ContextVar[_Held | None] = ContextVar("held", default=None)


class _Held(ExitStack):
    """A request's holds, its last opened checkpoint, and damage found there."""

    def __init__(self, linger_s: float) -> None:
        super().__init__()
        self._linger_s = linger_s
        self.opened: tuple[str, int] | None = None
        self.damage: Damaged | None = None

    def hold(self, readers: Readers, run: str, step: int) -> None:
        self.opened = run, step
        self.enter_context(readers.reading(run, step, OPENED, self._linger_s))


class ReadProtection:
    """Middleware: every request has a stack of holds, which ends with its response, however that ends.

    Damage found while answering is checked in the background.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        of_a_page = _held.get() is not None
        with _Held(0.0 if of_a_page else LINGER_S) as held:
            before = _held.set(held)
            try:
                await self._app(scope, receive, send)
            finally:
                _held.reset(before)
                if held.damage is not None and held.opened is not None:
                    scope["app"].state.services.saver.checks.suspect(*held.opened, held.damage)


def hold(readers: Readers, run: str, step: int) -> None:
    """Protect this checkpoint until the present request has been answered; `NoSuchCheckpoint` if it is too late."""
    held = _held.get()
    if held is None:
        readers.hold(run, step, OPENED, LINGER_S)
    else:
        held.hold(readers, run, step)


def met(error: Damaged) -> None:
    """The present request found damage in its last opened checkpoint."""
    held = _held.get()
    if held is not None:
        held.damage = error

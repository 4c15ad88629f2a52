"""Requests of the main thread, made in threads of their own.

Python runs signal handlers in the main thread, between any two of its steps. Were that thread to hold a lock of the
connection just then, nobody would hear from the daemon until the handler returns, and a handler that waits for a save would
wait for ever. So the main thread waits for another one, which nobody interrupts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from holdfast.threads.latch import Latch
from holdfast.transport import Reply, Transport
from holdfast_formats.staging import wire

_Result = TypeVar("_Result")


class BackgroundRequests:
    """A transport like the one it has."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    @property
    def alive(self) -> bool:
        return self._transport.alive

    def next_id(self) -> int:
        return self._transport.next_id()

    def request(self, message: wire.Request, kind: type[Reply], *timeout_s: float) -> Reply:
        return done(lambda: self._transport.request(message, kind, *timeout_s))

    def ask(self, message: wire.Request, kind: type[Reply], fds: tuple[int, ...] = (), *timeout_s: float) -> Reply:
        return done(lambda: self._transport.ask(message, kind, fds, *timeout_s))

    def tell(self, message: wire.Request) -> None:
        done(lambda: self._transport.tell(message))

    def take_fd(self) -> int:
        return done(self._transport.take_fd)

    def take_fds(self, count: int) -> list[int]:
        return done(lambda: self._transport.take_fds(count))

    def close(self, ended: bool = False) -> None:
        done(lambda: self._transport.close(ended))


def done(act: Callable[[], _Result]) -> _Result:
    """Do it, in another thread if this is the main one; what it returns or raises."""
    if threading.current_thread() is not threading.main_thread():
        return act()
    errand = _Errand(act)
    start(errand.run)
    errand.ended.wait()
    if errand.error is not None:
        raise errand.error
    result: _Result = errand.result
    return result


def start(act: Callable[[], object], name: str = "holdfast-aside") -> None:
    """Do it in the background; at once, where no thread can be started any more, as when the interpreter ends."""
    try:
        threading.Thread(target=act, name=name, daemon=True).start()
    except RuntimeError:
        act()


class _Errand:
    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self.ended = Latch()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._act()
        except BaseException as error:  # raised where it is waited for
            self.error = error
        finally:
            self.ended.set()

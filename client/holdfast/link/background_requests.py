"""Sends the requests of the user's threads from other threads.

Python runs signal handlers in the main thread, between any two bytecodes. If that thread held a lock of the connection
then, no thread would receive from the daemon until the handler returns, and a handler that waits for a save would
deadlock. So the main thread waits for another thread, which no handler interrupts. The user's other threads do the same,
because a wait for another thread can end where the daemon is silent. Only the client's own threads wait for as long as an
answer may take: no call waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from holdfast.threads import own_threads
from holdfast.threads.daemon_heartbeat import DaemonHeartbeat
from holdfast.threads.latch import Latch
from holdfast.transport import Reply, Transport
from holdfast_formats.staging import wire

_Result = TypeVar("_Result")
# Answered with descriptors, which nothing would close after a wait that was given up: the link itself bounds these.
_BRINGS_DESCRIPTORS = (wire.Reserve, wire.ReserveAverage, wire.Held, wire.HeldElsewhere)


class BackgroundRequests:
    """A transport with the methods of the one it wraps. A thread of the user stops waiting when `heartbeat` finds the daemon
    silent; the first contact ends then in every thread, because a save has nowhere to stage before it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.heartbeat = DaemonHeartbeat(lambda: transport.daemon, lambda within_s: _done(lambda: transport.ping(within_s)))

    @property
    def alive(self) -> bool:
        return self._transport.alive

    @property
    def near(self) -> bool:
        return self._transport.near

    @property
    def daemon(self) -> str:
        return self._transport.daemon

    def ping(self, timeout_s: float) -> None:
        self._transport.ping(timeout_s)

    def next_id(self) -> int:
        return self._transport.next_id()

    def request(self, message: wire.Request, kind: type[Reply], *timeout_s: float) -> Reply:
        wait = Latch.wait if isinstance(message, _BRINGS_DESCRIPTORS) else self.heartbeat.until
        ask = _aside if isinstance(message, wire.Hello) else _done
        return ask(lambda: self._transport.request(message, kind, *timeout_s), wait)

    def ask(self, message: wire.Request, kind: type[Reply], fds: tuple[int, ...] = (), *timeout_s: float) -> Reply:
        return _done(lambda: self._transport.ask(message, kind, fds, *timeout_s))

    def notify(self, message: wire.Request) -> None:
        _done(lambda: self._transport.notify(message))

    @property
    def receiving(self) -> AbstractContextManager[object]:
        return self._transport.receiving

    def take_fd(self) -> int:
        return _done(self._transport.take_fd)

    def take_fds(self, count: int) -> list[int]:
        return _done(lambda: self._transport.take_fds(count))

    def keep_average(self, fd: int) -> None:
        _done(lambda: self._transport.keep_average(fd))

    def close(self, ended: bool = False) -> None:
        _done(lambda: self._transport.close(ended))


def _done(act: Callable[[], _Result], wait: Callable[[Latch], object] = Latch.wait) -> _Result:
    return act() if own_threads.is_own() else _aside(act, wait)


def _aside(act: Callable[[], _Result], wait: Callable[[Latch], object]) -> _Result:
    request = _Request(act)
    own_threads.start(request.run)
    wait(request.ended)
    if request.error is not None:
        raise request.error
    result: _Result = request.result
    return result


class _Request:
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

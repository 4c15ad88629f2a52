"""Places that many share: of one peer's requests only so many at a time, and some that are kept for admins.

One reader with many connections, or many readers, do not keep an admin out, who would have to end them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class RequestPeer(NamedTuple):
    """Who asks, by token or else by address; `first`: admins by token, and probes of health."""

    name: str
    first: bool


NOBODY = RequestPeer("", True)
_asking: ContextVar[RequestPeer] = ContextVar("holdfast_asking", default=NOBODY)


def asking() -> RequestPeer:
    """Whose request is being answered; `NOBODY` outside of one."""
    return _asking.get()


@contextmanager
def asked_by(peer: RequestPeer) -> Iterator[None]:
    """Within the block the request is this peer's."""
    before = _asking.set(peer)
    try:
        yield
    finally:
        _asking.reset(before)


class Places:
    """So many at a time: three quarters of them for one peer, and an eighth for those who come first. For one event loop."""

    def __init__(self, total: Callable[[], int]) -> None:
        self._total = total
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[RequestPeer, asyncio.Future[None]]] = []

    @contextmanager
    def held(self, peer: RequestPeer) -> Iterator[bool]:
        """A place for the length of the block, if there is one now."""
        taken = self._take(peer)
        try:
            yield taken
        finally:
            if taken:
                self._give_back(peer)

    @asynccontextmanager
    async def awaited(self, peer: RequestPeer, wait_max_s: float) -> AsyncIterator[None]:
        """A place for the length of the block; `asyncio.TimeoutError` when none was free for so long."""
        if not self._take(peer):
            await self._wait(peer, wait_max_s)
        try:
            yield
        finally:
            self._give_back(peer)

    async def _wait(self, peer: RequestPeer, wait_max_s: float) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((peer, turn))
        try:
            await asyncio.wait_for(asyncio.shield(turn), wait_max_s)
        except BaseException:
            if turn.done():  # it was given a place in the same moment
                self._give_back(peer)
            raise
        finally:
            self._waiting = [(who, other) for who, other in self._waiting if other is not turn]

    def _take(self, peer: RequestPeer) -> bool:
        total = self._total()
        for_all = total if peer.first else total - total // 8
        free = self._held.total() < for_all and self._held[peer.name] < total - total // 4
        if free:
            self._held[peer.name] += 1
        return free

    def _give_back(self, peer: RequestPeer) -> None:
        self._held[peer.name] -= 1
        if not self._held[peer.name]:
            del self._held[peer.name]
        for who, turn in self._waiting:
            if not turn.done() and self._take(who):
                turn.set_result(None)

"""A limit on bytes shared by requests, which wait in the order of their arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Ration:
    """At most `bytes_max` are taken at a time; a larger request is admitted alone. For one event loop."""

    def __init__(self, bytes_max: int) -> None:
        self._max = self._left = bytes_max
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """Hold `size` bytes for as long as the block runs."""
        size = min(size, self._max)
        await self._take(size)
        try:
            yield
        finally:
            self._give_back(size)

    async def _take(self, size: int) -> None:
        if not self._waiting and size <= self._left:
            self._left -= size
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # its turn had come at this moment
                self._give_back(size)
            else:
                self._waiting.remove((size, turn))
                self._let_in()
            raise

    def _give_back(self, size: int) -> None:
        self._left += size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._left:
            size, turn = self._waiting.popleft()
            self._left -= size
            turn.set_result(None)

"""Coroutines that wait for events: none of them keeps a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast_service.control.catalog.events import Events

ASK_EVERY_S = 1.0  # nobody tells of what other nodes add to the catalog


class Listener:
    """Wakes its coroutine when an event is added, and often enough to notice other nodes' events."""

    def __init__(self) -> None:
        self._loop, self._heard = asyncio.get_running_loop(), asyncio.Event()

    def tell(self) -> None:
        """An event was added; called in any thread."""
        with suppress(RuntimeError):  # the loop is closed already, with all who waited in it
            self._loop.call_soon_threadsafe(self._heard.set)

    async def wait(self, timeout_s: float) -> None:
        """Return when an event has been added since the last wait, or when it is time to ask."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._heard.wait(), min(timeout_s, ASK_EVERY_S))
        self._heard.clear()


@contextmanager
def listening(events: Events) -> Iterator[Listener]:
    """A listener for the present coroutine; begin before what is waited for is asked for the first time."""
    listener = Listener()
    stop = events.listen(listener.tell)
    try:
        yield listener
    finally:
        stop()

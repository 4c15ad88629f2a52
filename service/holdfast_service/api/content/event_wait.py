"""Coroutines that wait for events, without a thread each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast_service.control.catalog.events import Events

ASK_EVERY_S = 1.0  # other nodes' events in the catalog come without a notification


class Listener:
    """Wakes its coroutine when an event is added, and often enough to notice other nodes' events."""

    def __init__(self) -> None:
        self._loop, self._heard = asyncio.get_running_loop(), asyncio.Event()

    def tell(self) -> None:
        """An event was added; called in any thread."""
        with suppress(RuntimeError):  # the loop is closed already, with all waiting coroutines
            self._loop.call_soon_threadsafe(self._heard.set)

    async def wait(self, timeout_s: float) -> None:
        """Return when an event has been added since the last wait, or when it is time to query."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._heard.wait(), min(timeout_s, ASK_EVERY_S))
        self._heard.clear()


@contextmanager
def listening(events: Events) -> Iterator[Listener]:
    """A listener for the present coroutine; create it before the first query."""
    listener = Listener()
    stop = events.listen(listener.tell)
    try:
        yield listener
    finally:
        stop()

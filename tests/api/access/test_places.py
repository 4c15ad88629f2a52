"""Places that many share: what one peer may have, and what is kept for those who come first."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from holdfast_service.api.access.places import Places, RequestPeer

READER, OTHER, ADMIN = RequestPeer("reader", False), RequestPeer("other", False), RequestPeer("admin", True)


def test_one_peer_never_has_them_all() -> None:
    """Of 16 places one reader has 12, all readers together 14, and an admin finds one of the last two."""

    async def story() -> None:
        places = Places(lambda: 16)
        async with AsyncExitStack() as held:
            for _ in range(12):
                await held.enter_async_context(places.awaited(READER, 0.01))
            with pytest.raises(asyncio.TimeoutError):
                await held.enter_async_context(places.awaited(READER, 0.01))
            for _ in range(2):
                await held.enter_async_context(places.awaited(OTHER, 0.01))
            with pytest.raises(asyncio.TimeoutError):
                await held.enter_async_context(places.awaited(OTHER, 0.01))
            await held.enter_async_context(places.awaited(ADMIN, 0.01))
        with places.held(READER) as free:
            assert free

    asyncio.run(story())


def test_who_waits_is_given_what_becomes_free() -> None:
    """A place goes to whoever may have it; one who has given up waiting takes none along."""

    async def story() -> None:
        places = Places(lambda: 1)

        async def wait(peer: RequestPeer, wait_s: float) -> str:
            async with places.awaited(peer, wait_s):
                return peer.name

        async with places.awaited(READER, 1):
            patient = asyncio.create_task(wait(OTHER, 30))
            gone = asyncio.create_task(wait(READER, 30))
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
        assert await patient == "other"
        assert await wait(ADMIN, 1) == "admin"

    asyncio.run(story())

"""Bytes that requests share: never more are out than there are, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import random

import pytest

from holdfast_service.api.content.rationing import Ration


@pytest.mark.parametrize("seed", range(5))
def test_never_more_than_there_is(seed: int) -> None:
    """Whoever comes, and whoever gives up while waiting or inside, all others get their turn and all bytes come back."""
    chance, out, most, done = random.Random(seed), 0, 0, 0

    async def one(ration: Ration, size: int) -> None:
        nonlocal out, most, done
        async with ration.taken(size):
            out += min(size, 100)
            most = max(most, out)
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                out -= min(size, 100)
        done += 1

    async def all_of_them() -> None:
        ration = Ration(100)
        tasks = [asyncio.create_task(one(ration, chance.choice((1, 30, 60, 100, 500)))) for _ in range(200)]
        ended = 0
        for task in chance.sample(tasks, 60):
            await asyncio.sleep(0)
            ended += task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert done >= 200 - ended
        async with ration.taken(100):  # everything came back
            pass

    asyncio.run(all_of_them())
    assert 0 < most <= 100


def test_first_come_first_served() -> None:
    """A large wish is not overtaken for ever by small ones."""
    order: list[str] = []

    async def one(ration: Ration, size: int, name: str) -> None:
        async with ration.taken(size):
            order.append(name)
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        ration = Ration(10)
        await asyncio.gather(*(one(ration, size, name) for size, name in ((6, "a"), (10, "large"), (1, "b"), (1, "c"))))

    asyncio.run(all_of_them())
    assert order == ["a", "large", "b", "c"]

"""MemoryTier takes the exam of all tiers."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import NoSpace
from holdfast_service.storage import MemoryTier
from tests.suites.tier_suite import TierSuite


class RawMemory:
    """Writes and reads the tables of a MemoryTier directly."""

    def __init__(self, tier: MemoryTier) -> None:
        self._tier = tier

    def write(self, path: str, data: bytes) -> None:
        names = tuple(path.split("/"))
        self._tier._directories.update(names[:depth] for depth in range(len(names)))
        self._tier._files[names] = bytearray(data)

    def read(self, path: str) -> bytes | None:
        held = self._tier._files.get(tuple(path.split("/")))
        return None if held is None else bytes(held)


class TestMemoryTier(TierSuite):
    @pytest.fixture
    def tier(self) -> MemoryTier:
        return MemoryTier()

    @pytest.fixture
    def raw(self, tier: MemoryTier) -> RawMemory:
        return RawMemory(tier)


def test_capacity_is_a_limit() -> None:
    """A tier that is full says so by name, and has room again when something is removed."""
    tier = MemoryTier(capacity_bytes=10)
    tier.put("a", b"12345678")
    for call in (lambda: tier.put("b", b"123"), lambda: tier.create("b", 3), lambda: tier.replace("b", b"123")):
        with pytest.raises(NoSpace):
            call()
    tier.remove_file("a")
    tier.put("b", b"123")
    assert tier.free_bytes() == 7


def test_acts_tell_the_order_of_durability() -> None:
    """What was made durable is listed in order, so that a test can check I3."""
    tier = MemoryTier()
    writer = tier.create("s/data", 1)
    tier.put("s/COMMIT", b"{}")
    writer.finish()
    tier.sync_directory("s")
    tier.publish("s", "c/s")
    assert tier.acts == [
        ("file", "s/COMMIT"),
        ("file", "s/data"),
        ("directory", "s"),
        ("rename", "c/s"),
        ("directory", "c"),
        ("directory", ""),
    ]

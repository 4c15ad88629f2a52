"""Buffered writes: paced, and no error lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast_formats.errors import StorageFailed
from holdfast_service.storage import PosixTier, writeback
from tests.storage.test_posix import failing


@pytest.fixture
def tier(tmp_path: Path) -> PosixTier:
    return PosixTier(tmp_path / "root")


class TestWriteback:
    """Buffered writes are written out as they come."""

    def write(self, tier: PosixTier, count: int) -> None:
        data = bytearray(2**20)  # unaligned memory or not, an odd offset keeps it in the cache
        writer = tier.create("file", count * len(data) + 1)
        try:
            for number in range(count):
                writer.write(1 + number * len(data), [data])
            writer.finish()
        finally:
            writer.discard()

    def test_dirty_bytes_are_bounded(self, tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every write is begun to be written out, and the oldest are waited for when too many are under way."""
        started: list[int] = []
        awaited: list[int] = []
        monkeypatch.setattr(writeback, "DIRTY_BYTES_MAX", 3 * 2**20)
        monkeypatch.setattr(writeback, "_start_writeback", lambda _, offset, length: started.append(offset))
        monkeypatch.setattr(writeback, "_await_writeback", lambda _, offset, length: awaited.append(offset))
        self.write(tier, 5)
        assert started == [1 + n * 2**20 for n in range(5)]
        assert awaited == started[:2]

    def test_an_error_met_while_waiting_is_raised(self, tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
        """fsync would not report it again (I9)."""
        monkeypatch.setattr(writeback, "DIRTY_BYTES_MAX", 0)
        monkeypatch.setattr(writeback, "_await_writeback", failing(errno.EIO))
        with pytest.raises(StorageFailed):
            self.write(tier, 1)

    def test_without_such_a_call_fsync_does_it(self, tier: PosixTier, monkeypatch: pytest.MonkeyPatch) -> None:
        """A file system that cannot write out ranges is asked once, and the file is durable all the same."""
        asked: list[int] = []

        def unknown(*_: object) -> None:
            asked.append(1)
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(writeback, "_start_writeback", unknown)
        self.write(tier, 3)
        assert len(asked) == 1

"""Writes no faster than was asked for."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from holdfast_service.storage.pacing import Pace
from holdfast_service.storage.posix import PosixTier


def test_what_is_written_together_takes_its_time_together() -> None:
    """Four threads that write a fifth of a second's worth in all are not through before that fifth has passed."""
    pace, began = Pace(100_000), time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(pace.take, [5_000] * 4))
    assert time.monotonic() - began >= 0.2


def test_time_that_nobody_used_is_not_made_up_for() -> None:
    """After a pause the pace is what it was: no burst follows."""
    pace = Pace(100_000)
    time.sleep(0.1)
    began = time.monotonic()
    pace.take(10_000)
    assert time.monotonic() - began >= 0.1


def test_a_tier_with_a_pace_writes_the_same_bytes_in_its_time(tmp_path: Path) -> None:
    """A file is written no faster than its size allows, and holds what was written."""
    began = time.monotonic()
    writer = PosixTier(tmp_path, Pace(50_000)).create("file", 10_000)
    writer.write(0, [bytes(4_000), b"x" * 6_000])
    writer.finish()
    assert time.monotonic() - began >= 0.2
    assert (tmp_path / "file").read_bytes() == bytes(4_000) + b"x" * 6_000

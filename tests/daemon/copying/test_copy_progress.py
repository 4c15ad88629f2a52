"""The progress of a copy, and its speed."""

from __future__ import annotations

import pytest

from holdfast_formats.naming import CheckpointId
from holdfast_service.daemon.copying import copy_progress
from holdfast_service.daemon.copying.copy_progress import CopyProgress
from tests.kit.clock import Clock


def test_progress_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes count once copied and once read back; the speed is of the last ten seconds, and falls while nothing moves."""
    clock = Clock(0.0)
    monkeypatch.setattr(copy_progress.time, "monotonic", lambda: clock.now)
    progress = CopyProgress()
    progress.moved(5)  # as of a check, which is no copy
    assert progress.now() is None
    with progress.of(CheckpointId("r", 7), 100):
        for _ in range(20):
            clock.now += 1.0
            progress.moved(4)
        found = progress.now()
        assert found is not None and (found.run, found.step, found.done_bytes, found.total_bytes) == ("r", 7, 80, 200)
        assert found.bytes_per_second == pytest.approx(4.0)
        clock.now += 100.0
        stands = progress.now()
        assert stands is not None and stands.bytes_per_second < 0.1
        progress.moved(1000)
        assert (full := progress.now()) is not None and full.done_bytes == 200
    assert progress.now() is None

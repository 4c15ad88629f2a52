"""What a drain costs the trainer: the bars, and a small run beside a real bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import drains
from benchmarks.drains import Lap, Wanted
from benchmarks.state import State
from tests.kit.objects import running_seaweedfs


def test_bars() -> None:
    """Stall and step are judged, by their medians."""
    wanted = Wanted(3, 1, 1)
    same = [(Lap(0.010, 0.001, 0.05), Lap(0.010, 0.001, 0.051), 1)] * 3
    assert drains.show(same, wanted) == []
    slower = [(Lap(0.010, 0.001, 0.05), Lap(0.011, 0.001, 0.052), 1)] * 3
    assert [one.partition(" ")[0] for one in drains.show(slower, wanted)] == ["step", "stall"]


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways save, and the bucket gets what only one of them sends."""
    state = State({"model/w": torch.ones(64, 64)}, 0, 1)
    with running_seaweedfs(tmp_path) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        pairs = drains.measure(tmp_path, server, drains.idle_server(), state, Wanted(1, 2, 2))
    ((local, drained, copied),) = pairs
    assert min(*local, *drained) > 0 and 0 <= copied <= 2

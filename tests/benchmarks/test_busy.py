"""Saves while all cores are busy: which bars are missed."""

from __future__ import annotations

from benchmarks import busy
from benchmarks.busy import Lap


def test_bars() -> None:
    """Durable beside an idle machine; steps and small operations beside the same processes without saves."""
    laps = {"idle": [Lap(1.0, 0, 0, 0)], "alone": [Lap(0, 0, 0.1, 0.01)], "busy": [Lap(1.5, 0.01, 0.105, 0.0105)]}
    assert busy.show(laps) == []
    laps["busy"] = [Lap(1.6, 0.01, 0.106, 0.0106)]
    assert [one.partition(":")[0] for one in busy.show(laps)] == ["durable", "step", "small operations"]


def test_what_keeps_a_core_busy_ends_with_the_block() -> None:
    with busy.burning(1) as (process,):
        assert process.poll() is None
    assert process.poll() is not None

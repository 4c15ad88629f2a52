"""The benchmark of ranks that restore together: that it measures both ways, and what it makes of the numbers."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks import node_load


def run(seconds: float, own: int) -> dict[str, object]:
    return {"seconds": seconds, "processor_s": 2 * seconds, "reports": [{"own_bytes": own}, {"own_bytes": 0}]}


def test_ratios_are_of_restores_next_to_each_other() -> None:
    """The median and the extremes of alone / together, pair by pair, not of medians."""
    found = node_load.summary({"together": [run(1, 0), run(2, 0), run(4, 0)], "alone": [run(2, 9), run(2, 9), run(2, 9)]})
    assert (found["ratio"], found["ratio_least"], found["ratio_most"]) == (1.0, 0.5, 2.0)
    assert (found["together_seconds"], found["alone_processor_s"]) == (2, 4)
    assert (found["together_own_bytes"], found["alone_own_bytes"]) == (0, 9)


def test_two_ranks_are_measured(tmp_path: Path) -> None:
    """Together nobody reads for itself what the disk has; alone each rank reads everything; the values are checked."""
    size = 2**20
    with node_load.saved(tmp_path / "root", size) as daemon:
        found = node_load.measure(daemon, 2, size, 1, cold=True)
    assert found["together_own_bytes"] == 0 and found["alone_own_bytes"] > size
    assert len(found["runs"]["together"]) == len(found["runs"]["alone"]) == 1 and found["ratio"] > 0

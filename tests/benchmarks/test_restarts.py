"""Restarts beside peers: which bars are missed, and a rank that restored something else."""

from __future__ import annotations

import pytest

from benchmarks import restarts
from benchmarks.restarts import AGAIN, KILLED, Start


def test_bars() -> None:
    """Only Holdfast's own part is held to them, at its median."""
    slow, fast = Start(1.6, 9.0, "x"), Start(0.4, 9.0, "x")
    found = {"holdfast": {KILLED: [fast, slow, fast], AGAIN: [slow]}, "dcp-sync": {KILLED: [slow], AGAIN: []}}
    assert [one.partition(":")[0] for one in restarts.show(found, {KILLED: 1.5, AGAIN: 1.5})] == [AGAIN]


def test_the_slowest_rank_counts_if_all_restored_what_they_had_saved() -> None:
    starts = [Start(0.4, 9.0, "a"), Start(0.6, 9.0, "b")]
    assert restarts.slowest(starts, ["a", "b"]) == starts[1]
    with pytest.raises(RuntimeError, match="did not restore"):
        restarts.slowest(starts, ["a", "a"])

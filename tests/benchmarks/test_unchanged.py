"""Saves of which most did not change: which bars are missed."""

from __future__ import annotations

from benchmarks import unchanged
from benchmarks.unchanged import FROZEN, TRAINED, Saved


def test_bars() -> None:
    """Milliseconds of `save()` and the step together, bytes written beside those that changed, and the restore."""
    full = [Saved(0.01, 0.3, 3.0, 2**31)]
    found = {FROZEN: [Saved(0.003, 0.002, 0.5, 1050)], TRAINED: full}
    assert unchanged.show(found, 1000, whole=True) == []
    found[FROZEN] = [Saved(0.004, 0.002, 0.5, 1051)]
    assert [one.partition(":")[0] for one in unchanged.show(found, 1000, whole=True)] == ["stall", "written"]
    assert len(unchanged.show(found, 1000, whole=False)) == 3

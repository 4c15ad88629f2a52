"""room: how many slots fit, and what a rank is told."""

from __future__ import annotations

from holdfast_formats.staging import arena
from holdfast_formats.staging.room import SegmentRoom, fitting


def test_as_many_slots_as_fit() -> None:
    """From all down to none."""
    asked = arena.geometry(3, 40_960, 4096)
    for slots in (3, 2, 1):
        needed = asked._replace(slots=slots).segment_bytes
        assert fitting(asked, SegmentRoom(needed, "x")) == slots
        assert fitting(asked, SegmentRoom(needed - 1, "x")) == slots - 1

"""launches.json: the newest launches of a run, bounded, and never in the way of anything."""

from __future__ import annotations

import pytest

from holdfast_formats.rest.runs import OWNER_LENGTH_MAX, RunLaunch
from holdfast_service.control.checkpoints import launch_records
from holdfast_service.control.checkpoints.launch_records import FILE_BYTES_MAX, LAUNCHES_MAX, LaunchRecords
from holdfast_service.storage import MemoryTier


def launch(attempt: int, **info: object) -> RunLaunch:
    return RunLaunch(attempt=attempt, at="2030-01-31T12:00:00Z", world=1, info=info)


def test_the_newest_launches_are_kept_in_order() -> None:
    """Said again, the last word of an attempt counts, and the same word writes nothing."""
    tier = MemoryTier()
    records = LaunchRecords(tier)
    for attempt in (2, 1, *range(3, LAUNCHES_MAX + 4)):
        assert records.note("r", launch(attempt, n=attempt))
    assert not records.note("r", launch(LAUNCHES_MAX + 3, n=LAUNCHES_MAX + 3))
    assert records.note("r", launch(LAUNCHES_MAX + 3, n=0))
    found = launch_records.read(tier, "r")
    assert [one.attempt for one in found] == list(range(4, LAUNCHES_MAX + 4)) and found[-1].info == {"n": 0}


def test_large_ones_push_older_ones_out() -> None:
    tier = MemoryTier()
    records = LaunchRecords(tier)
    for attempt in range(1, 6):
        records.note("r", launch(attempt, x="y" * (FILE_BYTES_MAX // 3)))
    assert [one.attempt for one in launch_records.read(tier, "r")] == [4, 5]
    assert (tier.size("r/launches.json") or 0) <= FILE_BYTES_MAX


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"format": 2}', b'{"format": 1, "launches": [{}]}', b"x" * (FILE_BYTES_MAX + 1)]
)
def test_a_damaged_file_says_nothing_and_is_replaced(data: bytes) -> None:
    tier = MemoryTier()
    tier.put("r/launches.json", data)
    assert launch_records.read(tier, "r") == []
    assert LaunchRecords(tier).note("r", launch(1))
    assert [one.attempt for one in launch_records.read(tier, "r")] == [1]


def test_who_answers_for_a_run() -> None:
    """Whom the newest launch names, else its user; text alone, and not endless."""
    assert launch_records.owner_of([]) is None
    assert launch_records.owner_of([launch(1, owner="a"), launch(2, user="u")]) == "u"
    assert launch_records.owner_of([launch(1, owner=5, user="u")]) == "u"
    assert launch_records.owner_of([launch(1, owner="x" * 1000)]) == "x" * OWNER_LENGTH_MAX
    assert launch_records.notes_of([launch(1, notes="n")]) == "n" and launch_records.notes_of([launch(1, notes=[])]) == ""

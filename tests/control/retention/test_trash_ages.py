"""How long deleted runs have been in the trash: no clock that jumps makes them much older, and time that passes does."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import naming
from holdfast_formats.errors import NoSpace
from holdfast_service.control.retention.trash_ages import LOOK_MAX_S, START_MAX_S, TrashAges
from holdfast_service.storage import MemoryTier

ENTRY = "r@5"
_clocks = st.floats(min_value=-1e13, max_value=1e13)


@given(st.lists(st.tuples(_clocks, st.booleans()), min_size=1, max_size=12))
def test_whatever_clocks_say(probe: list[tuple[float, bool]]) -> None:
    """An hour at most for a look, a day for a daemon's start (the second of each pair), and never younger again."""
    tier = MemoryTier()
    ages, most, seen = TrashAges(tier), 0.0, [0.0]
    for number, (clock, restarts) in enumerate(probe):
        if restarts:
            ages = TrashAges(tier)
        seen.append(ages.update(clock, {ENTRY: probe[0][0]})[ENTRY])
        most += 0.0 if number == 0 else START_MAX_S if restarts else LOOK_MAX_S
    assert seen[-1] <= most * (1 + 1e-9) and all(younger <= older for younger, older in pairwise(seen))


def test_time_that_passes_counts() -> None:
    """Between looks, and over restarts; of an entry that is new it counts from its deletion."""
    tier = MemoryTier()
    ages = TrashAges(tier)
    assert ages.update(1000.0, {}) == {} and not tier.size(naming.RUN_TRASH_AGES)
    assert ages.update(1000.0, {ENTRY: 990.0}) == {ENTRY: 0.0}
    assert ages.update(1600.0, {ENTRY: 990.0, "new@6": 1500.0}) == {ENTRY: 600.0, "new@6": 100.0}
    assert TrashAges(tier).update(44_800.0, {ENTRY: 990.0}) == {ENTRY: 43_800.0}
    found = ages.read()
    assert found is not None and found.seconds == {ENTRY: 43_800.0}
    ages.update(44_801.0, {})
    assert (left := ages.read()) is not None and left.seconds == {}


@pytest.mark.parametrize("said", ["{", "[]", '{"format":2,"at":1}', '{"at":1e300}', '{"at":1,"seconds":{"r@5":-1}}'])
def test_what_cannot_be_read_begins_anew(said: str) -> None:
    tier = MemoryTier()
    tier.put(naming.RUN_TRASH_AGES, said.encode())
    assert TrashAges(tier).update(1e10, {ENTRY: 0.0}) == {ENTRY: 0.0}
    assert TrashAges(tier).update(1e10 + 5, {ENTRY: 0.0}) == {ENTRY: 5.0}


def test_a_full_disk_stops_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = MemoryTier()
    ages = TrashAges(tier)
    ages.update(0.0, {ENTRY: 0.0})

    def full(path: str, data: bytes) -> None:
        raise NoSpace("full")

    monkeypatch.setattr(tier, "replace", full)
    assert ages.update(60.0, {ENTRY: 0.0}) == {ENTRY: 60.0}

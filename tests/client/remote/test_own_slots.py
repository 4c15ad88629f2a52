"""Slots in a rank's own memory: as few as saves need have memory, and a refusal says when there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from holdfast.remote.own_slots import OwnSegment
from holdfast_formats import memory_bounds
from holdfast_formats.errors import ArenaFull
from holdfast_formats.staging import arena
from holdfast_formats.staging.slot_pages import CALM_SAVES, have_pages


@pytest.fixture
def segment() -> Iterator[OwnSegment]:
    made = OwnSegment(arena.geometry(2, 4096, 4096))
    yield made
    os.close(made.fd)


def fill(segment: OwnSegment, step: int) -> int:
    slot = segment.lease(step, 1, 0)
    segment.memory[segment.geometry.data_offset(slot)] = 1
    return slot


def test_a_second_slot_has_memory_only_while_saves_overlap(segment: OwnSegment) -> None:
    """It is returned once so many saves in a row have done without."""
    for slot in [fill(segment, step) for step in (1, 2)]:
        segment.release(slot)
    for step in range(3, 3 + CALM_SAVES):
        assert have_pages(segment.fd, segment.geometry) == {0, 1}
        segment.release(fill(segment, step))
    assert have_pages(segment.fd, segment.geometry) == {0}
    assert arena.emptied(segment.memory, segment.geometry, 1) == 1
    assert [fill(segment, step) for step in (20, 21)] == [0, 1]


def test_without_memory_for_a_second_slot_there_is_none(segment: OwnSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there when it was reserved may have been taken since."""
    taken = memory_bounds.Bound("machine", 2**20, 0)
    monkeypatch.setattr(memory_bounds, "of_machine", lambda proc: taken)
    first = fill(segment, 1)
    with pytest.raises(ArenaFull, match="no memory for another one"):
        fill(segment, 2)
    segment.release(first)
    assert fill(segment, 3) == first


def test_a_slot_that_another_save_may_need_soon_counts_as_needed(segment: OwnSegment) -> None:
    """It keeps the memory that was touched ahead of need, until so many saves in a row have ended in time."""
    for step in range(2 * CALM_SAVES):
        slot, foreseen = fill(segment, step), segment.foresee()
        assert {slot, foreseen} == {0, 1}
        segment.memory[segment.geometry.data_offset(1)] = 1
        segment.release(slot)
        assert have_pages(segment.fd, segment.geometry) == {0, 1}
    for step in range(20, 20 + CALM_SAVES):
        segment.release(fill(segment, step))
    assert have_pages(segment.fd, segment.geometry) == {0}


def test_memory_that_is_not_there_is_not_foreseen(segment: OwnSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a slot, if all are in use."""
    fill(segment, 1)
    with monkeypatch.context() as patch:
        patch.setattr(memory_bounds, "of_machine", lambda proc: memory_bounds.Bound("machine", 2**20, 0))
        assert segment.foresee() is None
    assert segment.foresee() == 1
    fill(segment, 2)
    assert segment.foresee() is None

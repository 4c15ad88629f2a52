"""Which slots have memory is what the kernel says; the fewest are used, and what saves no longer need is returned."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from holdfast_formats.staging import arena
from holdfast_formats.staging.slot_pages import CALM_SAVES, LARGE_BYTES, RecentNeed, have_pages, in_order

SMALL, LARGE = arena.geometry(3, 4096, 4096), arena.geometry(3, 8 * LARGE_BYTES, 4096)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("segment")
    yield fd
    os.close(fd)


@pytest.mark.parametrize("geometry", [SMALL, LARGE])
def test_a_slot_has_memory_once_something_was_written_into_it(fd: int, geometry: arena.Geometry) -> None:
    """Of its data; headers of slots are written when the segment is made, and are not counted."""
    os.ftruncate(fd, geometry.segment_bytes)
    for slot in range(3):
        os.pwrite(fd, b"header", geometry.header_offset(slot))
    assert have_pages(fd, geometry) == set()
    for slot in (1, 2, 0):
        os.pwrite(fd, b"data", geometry.data_offset(slot) + geometry.data_bytes // 2)
        before = have_pages(fd, geometry)
        assert slot in before
    assert before == {0, 1, 2}


def test_a_large_page_of_a_neighbour_counts_for_the_neighbour(fd: int) -> None:
    """The kernel may back a slot's first or last bytes by a large page that its neighbour has touched."""
    os.ftruncate(fd, LARGE.segment_bytes)
    begin, end = LARGE.header_offset(1), LARGE.header_offset(2)
    os.pwrite(fd, bytes(LARGE_BYTES), end - LARGE_BYTES)
    os.pwrite(fd, bytes(LARGE_BYTES), begin)
    assert have_pages(fd, LARGE) == set()


def test_slots_with_memory_are_leased_first() -> None:
    """Then by the given order; those without only if they may have memory, which the first of all may."""
    order = [30, 10, 20].__getitem__
    assert in_order({0, 1, 2}, {0, 2}, order) == [2, 0, 1]
    assert in_order({0, 1, 2}, {0, 2}, order, may_grow=False) == [2, 0]
    assert in_order({1}, {0}, order, may_grow=False) == []
    assert in_order({0, 1, 2}, set(), order, may_grow=False) == [1, 2, 0]


def test_what_none_of_the_last_saves_needed_is_surplus() -> None:
    """As many as the busiest of them did stay, and as many as are in use; before that many saves nothing is known."""
    need = RecentNeed()
    for _ in range(CALM_SAVES - 1):
        need.note(1)
    assert need.surplus({0, 1, 2}, 0, {0, 1, 2}) == []
    need.note(2)
    assert need.surplus({0, 1, 2}, 0, {0, 1, 2}) == [2]
    for _ in range(CALM_SAVES - 1):
        need.note(1)
    assert need.surplus({0, 1, 2}, 1, {0, 1}) == [1], "one of the last saves needed two"
    need.note(1)
    assert need.surplus({0, 1, 2}, 0, {0, 1}) == [1, 0], "the third, which is not idle, stays"
    need.foresee(2)
    assert need.surplus({0, 1, 2}, 0, {0, 1, 2}) == [2], "the last save nearly needed two"
    assert need.surplus({0, 1}, 2, {1}) == []
    for _ in range(CALM_SAVES):
        need.note(1)
    assert need.surplus({0, 1}, 0, {0, 1}) == [1]
    assert need.surplus({1}, 0, {1}) == []

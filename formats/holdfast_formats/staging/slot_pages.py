"""Which slots of a segment have memory. A slot gets it when it is first filled; one that saves no longer need returns it.

Saves use as few slots as they can, so that a rank whose saves do not overlap has the memory of one slot. Shared memory has
holes where nothing was written, and the kernel says where: nothing about it is recorded, so that any daemon finds out.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable

from holdfast_formats.staging.arena import PAGE_BYTES, Geometry

LARGE_BYTES = 2 * 2**20  # of a large page: the kernel may give a slot's neighbour so much of it
CALM_SAVES = 8  # so many saves without the need of a slot, and its memory is returned


def have_pages(fd: int, geometry: Geometry) -> set[int]:
    """The slots of a segment whose data or table has memory."""
    return {slot for slot in range(geometry.slots) if _has_pages(fd, geometry, slot)}


def in_order(
    free: Iterable[int], with_pages: Collection[int], last: Callable[[int], int], may_grow: bool = True
) -> list[int]:
    """Free slots in the order in which they are leased: those with memory, then by `last`. Without `may_grow` none that
    needs memory beside that of others.
    """
    candidates = (slot for slot in free if may_grow or not with_pages or slot in with_pages)
    return sorted(candidates, key=lambda slot: (slot not in with_pages, last(slot), slot))


class RecentNeed:
    """How many slots the last saves of a rank needed at the same time."""

    def __init__(self) -> None:
        self._taken: deque[int] = deque(maxlen=CALM_SAVES)

    def note(self, taken: int) -> None:
        """A save begins; so many slots are taken now, with its own."""
        self._taken.append(taken)

    def foresee(self, taken: int) -> None:
        """The save that began last takes so long that the next one may begin with so many slots taken."""
        if self._taken:
            self._taken[-1] = max(self._taken[-1], taken)

    def surplus(self, with_pages: Collection[int], taken: int, idle: Collection[int]) -> list[int]:
        """Which of the `idle` slots to empty, while `taken` ones are in use: as many as none of the last saves needed."""
        if len(self._taken) < CALM_SAVES:
            return []
        count = len(with_pages) - max(taken, *self._taken)
        return sorted(idle, reverse=True)[: max(count, 0)]


def _has_pages(fd: int, geometry: Geometry, slot: int) -> bool:
    aside = min(LARGE_BYTES, geometry.slot_bytes // 4) // PAGE_BYTES * PAGE_BYTES
    begin, end = geometry.data_offset(slot) + aside, geometry.header_offset(slot) + geometry.slot_bytes - aside
    try:
        return os.lseek(fd, begin, os.SEEK_DATA) < end
    except OSError:  # no data up to the end of the segment
        return False

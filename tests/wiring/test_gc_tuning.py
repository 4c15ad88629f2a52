"""A daemon that serves is not held up by its garbage collector, and has its garbage collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from holdfast_service.wiring import gc_tuning


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def settled() -> Iterator[None]:
    before = gc.get_threshold()
    gc_tuning.settle()
    yield
    gc.set_threshold(*before)


def test_what_is_there_is_not_looked_at_again(settled: None) -> None:
    """Everything alive is set aside, so that a collection of the whole finds next to nothing to go through."""
    assert gc.get_freeze_count() > len(gc.get_objects())


def test_a_start_without_collections_ends_with_them() -> None:
    before = gc.get_threshold()
    gc.disable()
    try:
        gc_tuning.settle()
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.set_threshold(*before)


def test_a_page_of_objects_is_made_without_a_collection_of_all(settled: None) -> None:
    """As many objects as a page of a thousand rows makes never have everything looked at."""
    before = gc.get_stats()
    page = [[number] for number in range(40_000)]
    after = gc.get_stats()
    assert len(page) == 40_000
    assert after[2]["collections"] == before[2]["collections"]
    assert after[0]["collections"] - before[0]["collections"] < 10


def test_garbage_goes(settled: None) -> None:
    """What refers to itself is found all the same, after a few thousand more objects."""
    gc.collect()  # or the next look comes while it is being made, and it counts among the older ones
    gone = weakref.ref(Knot())
    kept = [Knot() for _ in range(3 * gc_tuning.THRESHOLDS[0])]
    assert len(kept) and gone() is None

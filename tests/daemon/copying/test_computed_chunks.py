"""Bands that are made ahead are those that are asked for, and nothing goes on when nobody asks any more."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from numpy.typing import NDArray

from holdfast_service.daemon.copying.computed_chunks import ComputedChunk, ComputedChunks

PLAN = [ComputedChunk(0, 0, True), ComputedChunk(0, 8, True), ComputedChunk(1, 0, False), ComputedChunk(2, 0, True)]
WAIT_S = 180.0


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def named(band: ComputedChunk) -> NDArray[np.uint8]:
    return np.array([band.tensor, band.start], np.uint8)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 0, 1, 3], [0, 2, 1], [3, 0]])
def test_each_is_the_one_that_is_asked_for(thread: ThreadPoolExecutor, order: list[int]) -> None:
    """Also by somebody who leaves one out, or goes back."""
    for executor in (thread, None):
        bands = ComputedChunks(PLAN, named, executor)
        for number in order:
            assert np.array_equal(bands.get(PLAN[number]), named(PLAN[number]))
        bands.close()


def test_the_next_one_is_made_meanwhile(thread: ThreadPoolExecutor) -> None:
    """If its decoder allows that."""
    begun = {band: Event() for band in PLAN}

    def make(band: ComputedChunk) -> NDArray[np.uint8]:
        begun[band].set()
        return named(band)

    bands = ComputedChunks(PLAN, make, thread)
    bands.get(PLAN[0])
    assert begun[PLAN[1]].wait(WAIT_S)
    bands.get(PLAN[1])
    bands.close()
    thread.submit(int).result(WAIT_S)
    assert not begun[PLAN[2]].is_set()


def test_an_error_comes_with_its_band(thread: ThreadPoolExecutor) -> None:
    def make(band: ComputedChunk) -> NDArray[np.uint8]:
        if band == PLAN[1]:
            raise OSError("a flipped bit")
        return named(band)

    bands = ComputedChunks(PLAN, make, thread)
    assert np.array_equal(bands.get(PLAN[0]), named(PLAN[0]))
    with pytest.raises(OSError, match="flipped"):
        bands.get(PLAN[1])
    bands.close()


def test_closing_waits_for_who_reads(thread: ThreadPoolExecutor) -> None:
    reads, goes_on, done = Event(), Event(), Event()

    def make(band: ComputedChunk) -> NDArray[np.uint8]:
        if band == PLAN[1]:
            reads.set()
            goes_on.wait(WAIT_S)
            done.set()
        return named(band)

    bands = ComputedChunks(PLAN, make, thread)
    bands.get(PLAN[0])
    assert reads.wait(WAIT_S)
    with ThreadPoolExecutor(1) as other:
        closing = other.submit(bands.close)
        assert not closing.done()
        goes_on.set()
        closing.result(WAIT_S)
    assert done.is_set()

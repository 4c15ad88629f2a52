"""Shared memory as ranks map it: the memfd's own bytes, whichever pages they stand in."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from holdfast.memory.mapping import LARGE_BYTES, Mapping

SIZE = 3 * LARGE_BYTES + 5 * mmap.PAGESIZE


@pytest.fixture
def fd() -> Iterator[int]:
    """An empty memfd of a few large pages and a bit."""
    made = os.memfd_create("test")
    os.ftruncate(made, SIZE)
    yield made
    os.close(made)


def test_touching_changes_nothing(fd: int) -> None:
    """All pages are in place afterwards, and what stood there still does, for every mapping of the memory."""
    writer = Mapping(fd, write=True)
    octets = np.frombuffer(writer.memory, np.uint8)
    octets[:] = np.random.default_rng(1).integers(0, 256, SIZE, dtype=np.uint8)
    before = octets.tobytes()
    reader = Mapping(fd, write=False)
    assert bytes(reader.memory) == before
    assert writer.touch(0, SIZE, lambda: False)
    assert bytes(reader.memory) == octets.tobytes() == before == os.pread(fd, SIZE, 0)
    assert os.fstat(fd).st_blocks * 512 >= SIZE


def test_a_touch_that_is_stopped_leaves_memory_alone(fd: int) -> None:
    """Stopped before it begins, it makes no page."""
    assert not Mapping(fd, write=True).touch(0, SIZE, lambda: True)
    assert os.fstat(fd).st_blocks == 0


@pytest.mark.parametrize("begin", [0, 3 * mmap.PAGESIZE, LARGE_BYTES])
def test_a_range_is_touched_alone(fd: int, begin: int) -> None:
    """Large pages are made only where they do not reach beyond it: what is beside it belongs to another slot."""
    end = SIZE - 2 * mmap.PAGESIZE
    assert Mapping(fd, write=True).touch(begin, end, lambda: False)
    assert os.fstat(fd).st_blocks * 512 == end - begin


def test_a_mapping_for_reading_cannot_be_written(fd: int) -> None:
    """Its memory is read-only, and outlives the descriptor and the mapping's own name."""
    memory = Mapping(fd, write=False).memory
    assert memory.readonly and len(memory) == SIZE
    with pytest.raises(TypeError):
        memory[0] = 1
    os.pwrite(fd, b"x", SIZE - 1)
    assert memory[SIZE - 1] == ord("x")


def test_what_cannot_be_mapped_is_an_os_error() -> None:
    """A descriptor that does not allow the access is refused, and nothing stays mapped over."""
    with open("/dev/null", "rb") as nothing, pytest.raises(OSError):
        Mapping(nothing.fileno(), write=True)

"""What is read once is the same as what is read in any other way, and leaves nothing in the page cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_files import direct
from holdfast_formats.errors import NoSuchResource
from holdfast_service.storage import MemoryTier, PosixTier, read_once, uncached_reads

SIZE = 5 * 2**20 + 777
DATA = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
SPANS = st.tuples(st.integers(0, SIZE + 5000), st.integers(0, 4 * 2**20))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("once")
    (made / "f").write_bytes(DATA.tobytes())
    return made


def forget(file: Path) -> None:
    """Have the page cache forget a file, as far as its file system has any."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


@given(SPANS, st.integers(0, 63), st.booleans())
def test_any_span_is_what_the_file_has(place: Path, span: tuple[int, int], shift: int, cold: bool) -> None:
    """Wherever it begins, in the file and in memory, past its end too, in pieces of any number; nothing else is written."""
    start, length = span
    if cold:
        forget(place / "f")
    memory = np.full(shift + length + 64, 7, np.uint8)
    read = read_once(PosixTier(place)).read_into("f", start, memory[shift : shift + length])
    assert read == max(min(length, SIZE - start), 0)
    assert np.array_equal(memory[shift : shift + read], DATA[start : start + read])
    assert (memory[:shift] == 7).all() and (memory[shift + read :] == 7).all()


def test_pieces(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is longer than the memory of a thread."""
    monkeypatch.setattr(uncached_reads, "SCRATCH_BYTES", 4 * direct.ALIGNMENT)
    forget(place / "f")
    memory = np.empty(SIZE - 13, np.uint8)
    assert read_once(PosixTier(place)).read_into("f", 13, memory) == memory.nbytes
    assert np.array_equal(memory, DATA[13:])


def test_nothing_is_left_in_the_cache(place: Path) -> None:
    """What was there before stays, and is taken from there."""
    tier, memory = PosixTier(place), np.empty(SIZE, np.uint8)
    forget(place / "f")
    if tier.is_cached("f", 0, SIZE):
        pytest.skip("the file system keeps its files in memory")
    read_once(tier).read_into("f", 0, memory)
    assert not tier.is_cached("f", 0, SIZE)
    tier.read_into("f", 0, memory)
    if not tier.is_cached("f", 0, SIZE):
        pytest.skip("the system does not tell what the page cache has")
    memory[:] = 0
    read_once(tier).read_into("f", 0, memory)
    assert np.array_equal(memory, DATA) and tier.is_cached("f", 0, SIZE)


def test_errors_and_other_tiers(place: Path) -> None:
    with pytest.raises(NoSuchResource):
        read_once(PosixTier(place)).read_into("g", 0, np.empty(2**21, np.uint8))
    memory = MemoryTier()
    assert read_once(memory) is memory

"""What is in the page cache is told page by page, and asking brings nothing there."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from holdfast.memory.page_cache import PageCacheState
from tests.checkpoints import cached_pages, forget

PAGES = 40


@pytest.fixture
def descriptor(tmp_path: Path):
    path = tmp_path / "d" / "f"
    path.parent.mkdir()
    path.write_bytes(np.random.default_rng(1).bytes(PAGES * mmap.PAGESIZE))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    yield descriptor
    os.close(descriptor)


def test_asking_reads_nothing(descriptor: int, tmp_path: Path) -> None:
    """However often, of whatever page: what was not there is not there afterwards; what is read is told."""
    found = PageCacheState(descriptor)
    assert all(found.holds(page * mmap.PAGESIZE + 7) for page in range(PAGES)), "as written"
    forget(tmp_path / "d")
    for _ in range(3):
        assert not any(found.holds(page * mmap.PAGESIZE + 7) for page in range(PAGES))
    assert cached_pages(descriptor) == 0
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is read ahead
    os.pread(descriptor, 1, 5 * mmap.PAGESIZE)
    assert [page for page in range(PAGES) if found.holds(page * mmap.PAGESIZE)] == [5]
    assert not found.holds(PAGES * mmap.PAGESIZE), "behind its end"


def test_an_empty_file_holds_nothing(tmp_path: Path) -> None:
    with open(tmp_path / "empty", "w+b") as file:
        assert not PageCacheState(file.fileno()).holds(0)


@pytest.mark.parametrize("refused", [False, True])
def test_who_is_not_told_asks_by_reading(descriptor: int, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """A file of somebody else: a read that may not wait answers, or an error says that nobody can."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = PageCacheState(descriptor)
    if refused:
        monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(95, "not here")))
        with pytest.raises(OSError, match="not here"):
            found.holds(0)
    else:
        assert found.holds(0)

"""Files that change are noticed from the first touch on, and whole files are digested from what passes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from holdfast_formats.digest import digest
from holdfast_formats.errors import NoSuchResource, StateMismatch
from holdfast_service.daemon.copying import watched_source
from holdfast_service.daemon.copying.watched_source import WatchedSource
from holdfast_service.storage import PosixTier

DATA = np.random.default_rng(5).bytes(5000)


@pytest.fixture
def source(tmp_path: Path) -> WatchedSource:
    (tmp_path / "file").write_bytes(DATA)
    return WatchedSource(PosixTier(tmp_path), digested=True)


def read(source: WatchedSource, start: int, stop: int) -> bytes:
    buffer = np.empty(stop - start, np.uint8)
    assert source.read_into("file", start, buffer) == stop - start
    return buffer.tobytes()


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 5000)],
        [(8, 1000), (1003, 3000), (3000, 4990)],  # a header, padding, and a tail that nobody reads
        [(100, 2000), (100, 1500), (1500, 5000)],  # read again, and across what is known
    ],
)
def test_a_file_that_is_read_in_order(
    source: WatchedSource, monkeypatch: pytest.MonkeyPatch, ranges: list[tuple[int, int]]
) -> None:
    """Its digest is that of all its bytes, and no second pass is made."""
    monkeypatch.setattr(watched_source, "AGAIN_BYTES_MAX", 0)
    for start, stop in ranges:
        assert read(source, start, stop) == DATA[start:stop]
    assert source.digest_of("file") == digest(DATA)


def test_a_file_that_is_read_otherwise(source: WatchedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one is read once more, a large one has no digest; so has one that is not there."""
    monkeypatch.setattr(watched_source, "GAP_BYTES_MAX", 100)
    read(source, 3000, 5000)
    read(source, 0, 3000)
    assert source.digest_of("file") == digest(DATA)
    monkeypatch.setattr(watched_source, "AGAIN_BYTES_MAX", 100)
    assert source.digest_of("file") is None and source.digest_of("missing") is None


def test_a_file_that_goes(source: WatchedSource, tmp_path: Path) -> None:
    """It is told from one that never was, and by the name that people know."""
    named = WatchedSource(PosixTier(tmp_path), shown=lambda path: f"./model/{path}")
    read(named, 0, 100)
    (tmp_path / "file").unlink()
    with pytest.raises(StateMismatch, match=r"^\./model/file is gone while the source was being read") as refused:
        read(named, 100, 200)
    assert refused.value.hint
    with pytest.raises(NoSuchResource):
        named.read_into("never", 0, np.empty(1, np.uint8))


def test_changes_are_noticed_from_the_first_touch(source: WatchedSource, tmp_path: Path) -> None:
    """Whoever has only asked for a file's size has touched it; a file that appears counts as changed, too."""
    assert source.size("file") == 5000 and source.size("new") is None
    source.check_unchanged(["file", "new"])
    (tmp_path / "new").write_bytes(b"")
    with pytest.raises(StateMismatch, match="new changed"):
        source.check_unchanged(["file", "new"])
    assert source.list("") == ["file", "new"]
    source.check_names()
    (tmp_path / "later").write_bytes(b"")
    with pytest.raises(StateMismatch, match="later has come"):
        source.check_names()
    (tmp_path / "later").unlink()
    (tmp_path / "new").unlink()
    with pytest.raises(StateMismatch, match="new is gone"):
        source.check_names()
    os.utime(tmp_path / "file", ns=(1, 1))
    with pytest.raises(StateMismatch, match="file changed"):
        source.check_unchanged(["file"])

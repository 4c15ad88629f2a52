"""Files without a name: reserved whole, gone with their last descriptor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast_formats.errors import NoSpace, StorageFailed
from holdfast_service.storage import scratch

SIZE = 2**20


def test_it_is_reserved_whole_and_has_no_name(tmp_path: Path) -> None:
    """Every block is there before a byte is written, and the directory shows nothing."""
    descriptor = scratch.open_scratch(tmp_path, SIZE, 0)
    assert os.fstat(descriptor).st_size == SIZE and os.fstat(descriptor).st_blocks * 512 >= SIZE
    assert scratch.is_scratch(descriptor) and list(tmp_path.iterdir()) == []
    os.close(descriptor)


def test_where_files_cannot_be_born_nameless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_TMPFILE gets a name that is taken away at once; one that a crash left is taken away too."""
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # what a kernel without it sees: a directory cannot be written
    (tmp_path / ".scratch").write_bytes(b"left by a crash")
    descriptor = scratch.open_scratch(tmp_path, SIZE, 0)
    assert scratch.is_scratch(descriptor) and list(tmp_path.iterdir()) == []
    os.close(descriptor)


def test_no_room_is_refused_with_the_numbers(tmp_path: Path) -> None:
    """What is needed, what must stay free beside it, and what is there."""
    with pytest.raises(NoSpace, match=rf"bytes free; staging needs {2**60} there, and the checkpoint another 7"):
        scratch.open_scratch(tmp_path, 2**60, 7)
    with pytest.raises(NoSpace, match=rf"needs {SIZE} there, and the checkpoint another {2**60}"):
        scratch.open_scratch(tmp_path, SIZE, 2**60)


def test_memory_is_no_disk() -> None:
    """A root in memory is refused: spilling would take what there is none of."""
    with pytest.raises(StorageFailed, match="in memory"):
        scratch.open_scratch(Path("/dev/shm"), SIZE, 0)


def test_what_has_a_name_or_a_hole_is_not_one(tmp_path: Path) -> None:
    """Somebody could find the first, and a write into the second could fail for want of a block."""
    with open(tmp_path / "named", "wb") as named, open(tmp_path / "hole", "wb") as hole:
        named.write(b"x" * 5000)
        named.flush()
        hole.truncate(SIZE)
        os.unlink(tmp_path / "hole")
        assert not scratch.is_scratch(named.fileno()) and not scratch.is_scratch(hole.fileno())


def test_emptied_it_keeps_its_blocks(tmp_path: Path) -> None:
    """What stood there reads as zeros, the rest as before, and the file is as large on disk as it was."""
    descriptor = scratch.open_scratch(tmp_path, SIZE, 0)
    os.pwrite(descriptor, b"x" * SIZE, 0)
    os.fdatasync(descriptor)
    scratch.empty(descriptor, 8192, 4096)
    assert os.pread(descriptor, 12_289, 4096) == b"x" * 4096 + bytes(4096) + b"x" * 4097
    assert scratch.is_scratch(descriptor)
    os.close(descriptor)


def test_the_probe_leaves_nothing(tmp_path: Path) -> None:
    """The disk's speed is measured in the file itself, which is empty afterwards."""
    descriptor = scratch.open_scratch(tmp_path, SIZE, 0)
    assert scratch.write_speed(descriptor, SIZE) > 0
    assert os.pread(descriptor, SIZE, 0) == bytes(SIZE)
    os.close(descriptor)

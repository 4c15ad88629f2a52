"""The lock beside a name: one writer at a time, and nothing left of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast_formats.alone import alone
from holdfast_formats.errors import InUse


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def test_one_at_a_time(tmp_path: Path, directory: int) -> None:
    """Another one is refused while the first writes; other names are free, and the file goes with the work."""
    with alone(directory, "out"):
        with pytest.raises(InUse, match="out"), alone(directory, "out"):
            pass
        with alone(directory, "other"):
            pass
    with alone(directory, "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_one_left_does_not_matter(tmp_path: Path, directory: int) -> None:
    """The lock is the kernel's, not the file's."""
    (tmp_path / ".out.lock").touch()
    with alone(directory, "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_never_two(directory: int) -> None:
    """Also while files are removed and made anew all the time."""
    inside, most, done = 0, 0, 0
    counting = threading.Lock()

    def work() -> None:
        nonlocal inside, most, done
        for _ in range(300):
            try:
                with alone(directory, "out"):
                    with counting:
                        inside += 1
                        most = max(most, inside)
                    with counting:
                        inside -= 1
                        done += 1
            except InUse:
                continue

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and done


def test_a_link_is_not_followed(tmp_path: Path, directory: int) -> None:
    """Nobody has a file made elsewhere."""
    (tmp_path / ".out.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError), alone(directory, "out"):
        pass
    assert not (tmp_path / "elsewhere").exists()

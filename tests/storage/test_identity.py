"""A root's identity: made once, by one of all who start at once, and it remembers that several daemons share the root."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import WrongRoot
from holdfast_formats.root_files import RootFile, decode
from holdfast_service.storage.identity import Identity, Whereabouts, known, settle
from holdfast_service.storage.posix import PosixTier

SHARED = "postgresql://db:5432/holdfast"


def begun(root: Path, catalog: str | None = None, leave: bool = False) -> Identity:
    return settle(PosixTier(root), Whereabouts(root), catalog, leave)


def read(root: Path) -> RootFile | None:
    return decode(RootFile, (root / naming.ROOT_FILE).read_bytes())


def test_all_who_start_at_once_are_of_one_root(tmp_path: Path) -> None:
    """Eight daemons on a new root: one id."""
    found: list[Identity] = []
    threads = [threading.Thread(target=lambda: found.append(begun(tmp_path, SHARED))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.mark.id for one in found}) == 1 and len(found) == 8
    assert known(tmp_path) == found[0].mark.id and list(tmp_path.iterdir()) == [tmp_path / naming.ROOT_FILE]


def test_who_comes_a_moment_later_is_of_the_same_root(tmp_path: Path) -> None:
    """The file appears between two looks at it."""
    firsts: list[Identity] = []

    class Late(PosixTier):
        def size(self, path: str) -> int | None:
            found = super().size(path)
            if not firsts:
                firsts.append(begun(tmp_path, SHARED))
            return found

    assert settle(Late(tmp_path), Whereabouts(tmp_path), SHARED) == firsts[0]


def test_a_root_that_was_one_daemons_becomes_shared_and_stays_it(tmp_path: Path) -> None:
    """Its id is the same; a daemon with another catalog, or one of its own, is refused by name."""
    before = begun(tmp_path)
    assert begun(tmp_path, SHARED) == before
    for other in (None, "postgresql://db:5432/another"):
        with pytest.raises(WrongRoot, match="db:5432/holdfast") as refused:
            begun(tmp_path, other)
        assert "catalog adopt" in str(refused.value.hint)
    assert begun(tmp_path, SHARED) == before
    assert begun(tmp_path, leave=True) == before == begun(tmp_path)


def test_a_copy_is_another_root_and_nobody_elses(tmp_path: Path) -> None:
    """Whoever copies a shared root may serve the copy alone."""
    (tmp_path / "root").mkdir()
    original = begun(tmp_path / "root", SHARED)
    shutil.copytree(tmp_path / "root", tmp_path / "copy")
    copied = begun(tmp_path / "copy")
    assert copied.copy_of == original.mark.id != copied.mark.id
    file = read(tmp_path / "copy")
    assert file is not None and file.catalog is None


def test_what_cannot_be_read_is_made_anew(tmp_path: Path) -> None:
    """A torn file says nothing."""
    (tmp_path / naming.ROOT_FILE).write_bytes(b"{")
    made = begun(tmp_path, SHARED)
    assert known(tmp_path) == made.mark.id

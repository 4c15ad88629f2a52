"""Paths below a root: the names along them, and what could lead out."""

from __future__ import annotations

import pytest

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.files import NAME_BYTES_MAX, check_position, split_leaf, split_path


def test_names_along_a_path() -> None:
    """The root has none; the last one is the file's."""
    assert split_path("") == [] and split_path("run/checkpoints/x") == ["run", "checkpoints", "x"]
    assert split_leaf("x") == ([], "x") and split_leaf("run/a/x") == (["run", "a"], "x")
    with pytest.raises(InvalidRequest, match="the root itself"):
        split_leaf("")


@pytest.mark.parametrize("path", ["/a", "a/", "a//b", ".", "a/../b", "a/./b", "a\0b", "ä" * NAME_BYTES_MAX])
def test_paths_that_lead_out(path: str) -> None:
    """Or whose names no file system takes."""
    with pytest.raises(InvalidRequest):
        split_path(path)


def test_positions_before_a_files_beginning() -> None:
    """Neither an offset nor a length counts from the end."""
    check_position("x", 0, 0)
    for offset, length in ((-1, 1), (0, -1)):
        with pytest.raises(InvalidRequest):
            check_position("x", offset, length)

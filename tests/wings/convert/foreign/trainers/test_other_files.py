"""A directory without some of its files reads as if they were not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from holdfast_service.storage import hub_snapshot
from holdfast_service.wings.convert.foreign.trainers.other_files import OtherFiles


def test_files_are_hidden_at_the_top_alone(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a", "b", "inner/a"):
        (tmp_path / name).write_bytes(name.encode())
    files = hub_snapshot.opened(tmp_path)
    others = OtherFiles(files, ["a"])
    assert others.label == files.label
    assert others.list("") == ["b", "inner"]
    assert others.list("inner") == ["a"]
    assert (others.size("a"), others.size("b"), others.size("inner/a")) == (None, 1, 7)
    assert others.stamp("b") == files.stamp("b")
    assert others.read("inner/a", 1, 3) == b"nne"
    into = np.zeros(7, np.uint8)
    assert others.read_into("inner/a", 0, into) == others.read_stored("inner/a", 0, into) == 7
    assert into.tobytes() == b"inner/a"

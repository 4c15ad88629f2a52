"""An export that is published: whole, alone, and not where runs and checkpoints are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.export.copy import copy_checkpoint, export
from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import DirectorySource
from holdfast_formats import naming
from holdfast_formats.errors import InUse, InvalidRequest
from tests.checkpoints import build


def opened(path: Path, value: int) -> CheckpointReader:
    build(path, {"model": {"weight": np.full((64, 64), value, np.float32)}})
    return CheckpointReader.open(DirectorySource(path))


def test_two_exports_to_one_name(tmp_path: Path) -> None:
    """The second one is refused while the first writes. It used to empty its directory, and publish the first one's half."""
    first, second = (opened(tmp_path / f"step-{n}", n) for n in (1, 2))
    target, refused = tmp_path / "new" / "out", []

    def meanwhile(count: int) -> None:
        with pytest.raises(InUse) as raised:
            export(second, target, [], lambda count: None)
        refused.append(raised.value)

    done = export(first, target, [], meanwhile)
    assert refused and done.committed
    assert sorted(path.name for path in target.parent.iterdir()) == ["out"]
    with CheckpointReader.open(DirectorySource(target)) as reader:
        assert reader.manifest == first.manifest


def test_not_into_a_run(tmp_path: Path) -> None:
    """A copy beside the checkpoints of a run was listed as one of them, of another step."""
    reader = opened(tmp_path / "root" / naming.checkpoint_path("run", 5), 1)
    (tmp_path / "root" / naming.LOCK).touch()
    place = tmp_path / "root" / naming.checkpoint_path("run", 9)
    with pytest.raises(InvalidRequest, match="outside the checkpoint root"):
        export(reader, place, [], lambda count: None)
    with pytest.raises(InvalidRequest, match="outside the checkpoint root"):
        copy_checkpoint(reader, place, [], lambda count: None)
    assert [path.name for path in place.parent.iterdir()] == ["step-00000005"]

"""What a directory of Paddle may not be: with endless documents, or with something else in place of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_formats.errors import CorruptManifest, LimitExceeded, StateMismatch
from holdfast_formats.rest.jobs import ReadOptions
from holdfast_service.wings.convert.foreign.paddle import unified
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.paddle import written


@pytest.mark.parametrize("name", ["config.json", "optimizer.safetensors.index.json", "trainer_state.json"])
def test_documents_without_end(tmp_path: Path, name: str) -> None:
    """A file of JSON that is larger than memory is not read."""
    folder = written.unified(tmp_path)
    with (folder / name).open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(LimitExceeded, match=name):
        written.read(unified.KIND, folder)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    """State in place of which something else stands is refused, and weights whose layout nobody knows."""
    folder = written.unified(tmp_path)
    for name in ("scheduler.pdparams", "config.json"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises((StateMismatch, CorruptManifest), match=f"{name} is no"):
            unified.KIND.read(OnDisk(folder), ReadOptions())
        (folder / name).rmdir()
        (folder / name).write_bytes(kept)
    (folder / "ema").mkdir()
    (folder / "ema" / "a.pdparams").write_bytes(b"x")
    with pytest.raises(StateMismatch, match=r"ema/a\.pdparams is in a directory"):
        written.read(unified.KIND, folder)
    (folder / "ema" / "a.pdparams").unlink()
    written.write_set(folder, "model", written.halves({name: written.weight(name) for name in written.SHAPES}), "tf")
    with pytest.raises(StateMismatch, match="has format 'tf'"):
        written.read(unified.KIND, folder)

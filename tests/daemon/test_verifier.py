"""The check after a commit reads what is stored, whole, and names the first damage (I7)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CorruptExtent, CorruptManifest, NotCommitted
from holdfast_service.daemon.verifier import verify
from holdfast_service.storage import PosixTier
from tests.checkpoints import Built, build, flip

FILE = "model.safetensors"


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "root" / "checkpoint", file_bytes_max=100_000)


@pytest.fixture
def tier(built: Built) -> PosixTier:
    return PosixTier(built.path.parent)


def test_a_sound_one(tier: PosixTier, built: Built) -> None:
    """The manifest is handed back."""
    assert verify(tier, "checkpoint") == built.manifest


@pytest.mark.parametrize("change", [-1, 1, None], ids=["shorter", "longer", "gone"])
def test_every_file_has_its_length(tier: PosixTier, built: Built, change: int | None) -> None:
    """One byte less, one byte more that no digest covers, or no file at all: the file is named."""
    path = built.path / FILE
    if change is None:
        path.unlink()
    else:
        size = path.stat().st_size
        os.truncate(path, size + change)
    with pytest.raises(CorruptManifest) as caught:
        verify(tier, "checkpoint")
    assert caught.value.members["file"] == FILE


def test_a_flipped_bit(tier: PosixTier, built: Built) -> None:
    """The tensor and the range are named."""
    name, entry = next((n, e) for n, e in built.manifest.tensors["model"].items() if e.nbytes)
    flip(built.path / entry.file, entry.start)
    with pytest.raises(CorruptExtent) as caught:
        verify(tier, "checkpoint")
    assert (caught.value.members["tensor"], caught.value.members["offset"]) == (name, entry.start)


def test_no_checkpoint(tier: PosixTier, built: Built) -> None:
    """Without COMMIT there is none."""
    (built.path / naming.COMMIT).unlink()
    with pytest.raises(NotCommitted):
        verify(tier, "checkpoint")

"""The check after a commit reads what is stored, whole, and names the first damage (I7)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast_formats import naming
from holdfast_formats.errors import CorruptExtent, CorruptManifest, NotCommitted, StorageFailed
from holdfast_service.daemon.checking import verifier
from holdfast_service.daemon.checking.verifier import examine, verify
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


class Failing:
    """A tier over a disk that has lost a place, and reads around it; `after` is what it reads there at the second try."""

    def __init__(self, tier: PosixTier, file: str, code: int, after: bytes | None = None) -> None:
        self._tier, self._file, self._code, self._after = tier, file, code, after

    def __getattr__(self, name: str) -> object:
        return getattr(self._tier, name)

    def read_stored(self, path: str, offset: int, buffer: object) -> int:
        if path.endswith(self._file):
            raise StorageFailed("read: Input/output error", errno=self._code)
        return self._tier.read_stored(path, offset, buffer)  # type: ignore[arg-type]

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        if path.endswith(self._file):
            if self._after is None:
                raise StorageFailed("read: Input/output error", errno=self._code)
            buffer[:] = self._after[: len(buffer)]
            return len(buffer)
        return self._tier.read_into(path, offset, buffer)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        if path.endswith(self._file):
            raise StorageFailed("read: Input/output error", errno=self._code)
        return self._tier.read(path, offset, length)


def test_a_place_that_the_disk_lost_is_damage(tier: PosixTier, built: Built) -> None:
    """EIO in one file, while others can be read: every piece of it is named, and no other."""
    found = examine(Failing(tier, FILE, errno.EIO), "checkpoint")  # type: ignore[arg-type]
    assert found.manifest is not None and found.damages
    assert {error.members["file"] for error in found.damages} == {FILE}
    assert all("cannot be read" in error.detail for error in found.damages)


def test_what_a_failing_disk_gives_after_all_is_proven(tier: PosixTier, built: Built) -> None:
    """The second try brings bytes: they are right, or they are damage."""
    wrong = examine(Failing(tier, FILE, errno.EIO, b"\0" * 2**20), "checkpoint")  # type: ignore[arg-type]
    assert any("do not match their digest" in error.detail for error in wrong.damages)


def test_a_disk_that_cannot_be_asked_is_no_damage(tier: PosixTier, built: Built) -> None:
    """Another failure, or one that COMMIT meets as well, stands in the way of reading."""
    for failing in (Failing(tier, FILE, errno.EACCES), Failing(tier, "", errno.EIO)):
        with pytest.raises(StorageFailed):
            examine(failing, "checkpoint")  # type: ignore[arg-type]


def test_all_damages_are_named_up_to_a_limit(tier: PosixTier, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several files at once; `only` looks at those that are named."""
    for file in ("config.json", FILE):
        flip(built.path / file, (built.path / file).stat().st_size - 1)
    assert {error.members["file"] for error in examine(tier, "checkpoint").damages} == {"config.json", FILE}
    assert [error.members["file"] for error in examine(tier, "checkpoint", only={FILE}).damages] == [FILE]
    monkeypatch.setattr(verifier, "DAMAGES_MAX", 1)
    assert len(examine(tier, "checkpoint").damages) == 1

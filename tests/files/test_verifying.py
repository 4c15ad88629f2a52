"""Stored pieces are read, checked and lent; what is damaged is named, and nothing of it is lent."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast_files.verifying import ReadControl, StoredCheckpoint, VerifiedBatch, copy_files, read_verified
from holdfast_formats.disk import verification
from holdfast_formats.errors import CorruptExtent, NoSuchResource
from holdfast_service.storage import MemoryTier, PosixTier
from tests.checkpoints import Built, build, flip


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build(tmp_path / "root" / "checkpoint", file_bytes_max=100_000)


def stored(built: Built) -> StoredCheckpoint:
    return StoredCheckpoint(PosixTier(built.path.parent), "checkpoint", built.manifest)


def pieces(built: Built) -> list[verification.Piece]:
    return [piece for listed in verification.pieces(built.manifest).values() for piece in listed]


@pytest.mark.parametrize("workers", [1, 4])
def test_every_byte_is_lent_once(built: Built, workers: int) -> None:
    """By one thread or by several, aligned or not; headers and small files too."""
    files = {file.name: bytearray(file.bytes) for file in built.manifest.files}
    sizes: list[int] = []

    def take(batch: VerifiedBatch) -> None:
        for piece in batch.pieces:
            files[piece.file][piece.start : piece.stop] = batch.of(piece).tobytes()

    for alignment in (1, 2**16):
        sizes.clear()
        control = ReadControl(workers, moved=sizes.append, alignment=alignment)
        read_verified(stored(built), verification.grouped(pieces(built)), take, control=control)
        assert {name: bytes(data) for name, data in files.items()} == {
            name: (built.path / name).read_bytes() for name in files
        }
        assert sum(sizes) == built.manifest.bytes


def test_damage_is_raised_or_told_and_never_lent(built: Built) -> None:
    """The pieces around it are lent all the same, where damage is collected."""
    listed = pieces(built)
    by_file = verification.grouped(listed)
    bad = next(piece for piece in listed if piece.tensor is not None and piece.length)
    flip(built.path / bad.file, bad.start)
    lent: list[verification.Piece] = []
    told: list[verification.Piece] = []
    with pytest.raises(CorruptExtent):
        read_verified(stored(built), by_file)
    read_verified(stored(built), by_file, lambda batch: lent.extend(batch.pieces), lambda piece, error: told.append(piece))
    assert told == [bad] and sorted(lent) == sorted(piece for piece in listed if piece != bad)


def test_an_empty_file_that_is_gone_is_missed(built: Built) -> None:
    """It has no byte to read, and has to be there nevertheless."""
    name = next(file.name for file in built.manifest.files if not file.bytes)
    (built.path / name).unlink()
    with pytest.raises(NoSuchResource):
        read_verified(stored(built), [verification.pieces(built.manifest)[name]])


def test_a_copy_is_the_same_files(built: Built) -> None:
    """Each is finished when its last byte is written; a damaged one stops the copy."""
    target = MemoryTier()
    files = built.manifest.files
    copy_files(stored(built), built.manifest, files, target.create, ReadControl(workers=3))
    assert {name: target.read(name) for name in target.list("")} == {
        file.name: (built.path / file.name).read_bytes() for file in files
    }
    first = next(file for file in files if file.bytes)
    flip(built.path / first.name, 0)
    with pytest.raises(CorruptExtent):
        copy_files(stored(built), built.manifest, [first], MemoryTier().create, ReadControl())

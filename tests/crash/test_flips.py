"""Whatever bit of a committed checkpoint turns round, and wherever a file is cut: it is found, and named (I7, bar 2)."""

from __future__ import annotations

import os
import random
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from holdfast.read.reader import CheckpointReader
from holdfast.read.sources import DirectorySource
from holdfast_formats import naming
from holdfast_formats.disk import manifests, verification
from holdfast_formats.disk.verification import Piece
from holdfast_formats.errors import CheckpointError, Damaged
from tests.checkpoints import Built, build, flip
from tests.crash import ledger

TENSORS = 50
FLIPS = 10_000
CUTS = 1_000
VERIFIED_WHOLE = 60  # of the flips and cuts, as many as are also put before `holdfast verify`
UNLISTED = (naming.MANIFEST, naming.COMMIT)  # what vouches for the others
LANE = "flipped bits and cut files"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A checkpoint of fifty tensors of all sizes in two groups and several files, and an empty one."""
    rng = np.random.default_rng(5)
    arrays: dict[str, dict[str, np.ndarray]] = {"model": {}, "optim": {}}
    for index in range(TENSORS):
        shape = (int(rng.integers(1, 40)), int(rng.integers(1, 60)))
        arrays[("model", "optim")[index % 2]][f"layers.{index}.weight"] = rng.standard_normal(shape).astype(np.float32)
    return build(tmp_path_factory.mktemp("flips") / "checkpoint", arrays, file_bytes_max=40_000)


class Bytes:
    """All files of a checkpoint in memory, read as a reader does: COMMIT, manifest, then whole pieces."""

    def __init__(self, built: Built) -> None:
        self.path = built.path
        self.files = {path.name: bytearray(path.read_bytes()) for path in sorted(built.path.iterdir())}
        self.pieces: Mapping[str, tuple[Piece, ...]] = verification.pieces(built.manifest)
        self.manifest = built.manifest
        self._names = list(self.files)
        self._ends = list(np.cumsum([len(data) for data in self.files.values()]))

    def place(self, position: int) -> tuple[str, int]:
        """The file and the offset of the `position`-th byte of them all."""
        at = bisect_right(self._ends, position)
        return self._names[at], position - (self._ends[at - 1] if at else 0)

    @property
    def total(self) -> int:
        return int(self._ends[-1])

    def read(self, file: str, offset: int, length: int) -> list[Damaged]:
        """What a reader of these bytes, or of all of a file that is cut, is told."""
        try:
            if file in UNLISTED:  # read in full each time; the others are proven by what was decoded once
                manifests.decode(bytes(self.files[naming.MANIFEST]), bytes(self.files[naming.COMMIT]))
            else:
                verification.check_size(self.manifest, file, len(self.files[file]))
                for piece in verification.overlapping(self.pieces[file], offset, offset + length):
                    verification.check(piece, memoryview(self.files[file])[piece.start : piece.stop])
        except Damaged as error:
            return [error]
        return []


def check_named(data: Bytes, file: str, offset: int, found: list[Damaged]) -> None:
    """The damage is found, and its name says file, tensor and a range that holds the byte."""
    assert found, f"{file}, byte {offset}: handed over"
    if file in UNLISTED:
        return
    (error,) = found
    (piece,) = verification.overlapping(data.pieces[file], offset, offset + 1)
    members = error.members
    assert members["file"] == file
    assert members["offset"] <= offset < members["offset"] + members["length"]
    assert members["tensor"] == piece.tensor


def test_every_flipped_bit_is_found_and_named(built: Built) -> None:
    """Ten thousand single bits at random places of all files: each is found, with its tensor and range."""
    data, chance = Bytes(built), random.Random(1)
    for _ in range(FLIPS):
        file, offset = data.place(chance.randrange(data.total))
        bit = 1 << chance.randrange(8)
        ledger.tried(LANE)
        data.files[file][offset] ^= bit
        check_named(data, file, offset, data.read(file, offset, 1))
        data.files[file][offset] ^= bit
        ledger.survived(LANE)
    assert all(data.read(file, 0, len(content)) == [] for file, content in data.files.items())


def test_every_cut_is_found_and_named(built: Built) -> None:
    """A thousand cuts at random lengths of all files, none of them included, and one byte too many."""
    data, chance = Bytes(built), random.Random(2)
    for _ in range(CUTS):
        file, length = data.place(chance.randrange(data.total))
        whole = data.files[file]
        for cut in (whole[:length], bytearray([*whole, 0])):
            ledger.tried(LANE)
            data.files[file] = cut
            found = data.read(file, 0, len(whole))
            assert found, f"{file} of {len(cut)} bytes: handed over"
            if file not in UNLISTED and len(cut) < len(whole):
                check_cut(data, file, length, found[0])
            data.files[file] = whole
            ledger.survived(LANE)


def check_cut(data: Bytes, file: str, length: int, error: Damaged) -> None:
    """The name of a cut says the file, where it ends, and a tensor that lost bytes, if any did."""
    assert (error.members["file"], error.members["offset"]) == (file, length)
    lost = [piece.tensor for piece in data.pieces[file] if piece.stop > length and piece.tensor is not None]
    assert error.members["tensor"] == (lost[0] if lost else None)


@pytest.fixture
def copy(built: Built, tmp_path: Path) -> Iterator[Path]:
    """A copy that a test may damage."""
    yield Path(shutil.copytree(built.path, tmp_path / "copy"))


def test_a_sample_of_them_on_the_disk(built: Built, copy: Path) -> None:
    """`verify` on files finds the same: one damage, with file, tensor and range; mended, there is none."""
    data, chance = Bytes(built), random.Random(3)
    for number in range(VERIFIED_WHOLE):
        file, offset = data.place(chance.randrange(data.total))
        ledger.tried(LANE)
        if number % 2:
            flip(copy / file, offset, chance.randrange(8))
        else:
            os.truncate(copy / file, offset)
        try:
            with CheckpointReader.open(DirectorySource(copy), complete=False) as reader:
                found = reader.verify()
            assert file not in UNLISTED
            assert found and found[0].file == file
            assert all(damage.file == file for damage in found)
            assert found[0].offset <= offset <= found[0].offset + found[0].length
        except CheckpointError as error:
            assert file in UNLISTED and isinstance(error, Damaged), error
        shutil.copyfile(built.path / file, copy / file)
        ledger.survived(LANE)
    with CheckpointReader.open(DirectorySource(copy)) as reader:
        assert reader.verify() == []

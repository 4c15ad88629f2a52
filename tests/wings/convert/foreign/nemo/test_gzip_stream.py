"""Any place of a gzip file is read as if it were unpacked; a damaged one and a bomb are refused."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from holdfast_formats.errors import CheckpointError, CorruptManifest, LimitExceeded
from holdfast_service.wings.convert.foreign.nemo import gzip_stream
from holdfast_service.wings.convert.foreign.nemo.gzip_stream import GzipStream
from tests.wings.convert.foreign.directories import OnDisk


def stream(top: Path, data: bytes) -> GzipStream:
    (top / "m.nemo").write_bytes(data)
    return GzipStream(OnDisk(top), "m.nemo")


def read(made: GzipStream, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    return bytes(buffer[: made.read_into(offset, memoryview(buffer))])


def test_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards, backwards, across states, and beyond the end; states stay few however long the file is."""
    monkeypatch.setattr(gzip_stream, "DISTANCE_BYTES", 1000)
    monkeypatch.setattr(gzip_stream, "MADE_BYTES", 700)
    monkeypatch.setattr(gzip_stream, "STATES_MAX", 8)
    draw = random.Random(0)
    data = draw.randbytes(30_000) + bytes(9_000) + draw.randbytes(20_001)
    made = stream(tmp_path, gzip.compress(data))
    assert made.size == len(data) and len(made._states) <= 8
    for _ in range(300):
        offset, length = draw.randrange(len(data) + 9), draw.randrange(5000)
        assert read(made, offset, length) == data[offset : offset + length]


@pytest.mark.parametrize("case", ["cut", "changed", "more", "twice", "empty"])
def test_damaged(tmp_path: Path, case: str) -> None:
    """The CRC-32 at the end of the file is compared, too."""
    packed = gzip.compress(random.Random(1).randbytes(9_000))
    changed = bytearray(packed)
    changed[5000] ^= 1
    files = {"cut": packed[:-9], "changed": changed, "more": packed + b"\0", "twice": packed * 2, "empty": b""}
    with pytest.raises(CorruptManifest) as refused:
        stream(tmp_path, bytes(files[case]))
    assert refused.value.members["file"] == "m.nemo"


def test_every_cut(tmp_path: Path) -> None:
    packed = gzip.compress(random.Random(2).randbytes(300))
    for at in range(len(packed)):
        with pytest.raises(CheckpointError):
            stream(tmp_path, packed[:at])


def test_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gzip_stream, "BOMB_BYTES", 2**21)
    with pytest.raises(LimitExceeded, match="unpacks to over 2097152 bytes"):
        stream(tmp_path, gzip.compress(bytes(2**22)))

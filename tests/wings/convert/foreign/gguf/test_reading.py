"""A header of GGUF is read as it is written, and nothing that it claims is believed."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from holdfast_formats.errors import CheckpointError, CorruptManifest, LimitExceeded, StateMismatch
from holdfast_service.wings.convert.foreign.gguf import reading
from holdfast_service.wings.convert.foreign.gguf.reading import GgufHeader
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.gguf.files import LLAMA, encoded

ARRAYS = {"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(3, np.float16)}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def read(directory: Path, data: bytes) -> GgufHeader:
    (directory / "m.gguf").write_bytes(data)
    return reading.read(OnDisk(directory), "m.gguf")


def head(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def test_what_is_written(tmp_path: Path) -> None:
    """Values of all types, and tensors at the places of their bytes."""
    data = encoded({**LLAMA, "flag": True, "count": -3}, ARRAYS)
    found = read(tmp_path, data)
    assert found.metadata["tokenizer.ggml.tokens"] == ["a", "b", "é"] and found.metadata["flag"] is True
    assert found.metadata["tokenizer.ggml.scores"] == [0.5, 1.5, -1.0] and found.metadata["count"] == -3
    first, second = found.tensors
    assert (first.name, first.shape, second.kind) == ("a", (3, 4), 1)
    assert data[first.start : first.start + 48] == ARRAYS["a"].tobytes()


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """Each length but the whole one is refused, by the file, until the tensors begin."""
    data = encoded(LLAMA, ARRAYS)
    data = data[: read(tmp_path, data).tensors[0].start]
    for length in range(len(data)):
        with pytest.raises(CheckpointError) as refused:
            read(tmp_path, data[:length])
        assert refused.value.members["file"] == "m.gguf"


TINY = text("k") + struct.pack("<I", 4) + struct.pack("<I", 1)
ENTRY = text("t") + struct.pack("<IQIQ", 1, 4, 0, 0)
BAD: dict[str, tuple[bytes, str, type[CheckpointError]]] = {
    "another file": (b"PK\3\4" + bytes(90), "does not begin", CorruptManifest),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n" + bytes(90), "Git LFS", CorruptManifest),
    "version 1": (head(version=1) + bytes(90), "version 1", StateMismatch),
    "big-endian": (head(version=3 << 24) + bytes(90), "big-endian", StateMismatch),
    "tensors": (head(tensors=2**62) + bytes(90), "more than it has room for", CorruptManifest),
    "many tensors": (head(tensors=2**19) + bytes(2**24), "over the limit", LimitExceeded),
    "keys": (head(keys=2**40) + bytes(90), "more than it has room for", CorruptManifest),
    "a long text": (head(keys=1) + struct.pack("<Q", 2**63) + bytes(90), "room", CorruptManifest),
    "a key twice": (head(keys=2) + TINY + TINY + bytes(90), "twice", CorruptManifest),
    "a type": (head(keys=1) + text("k") + struct.pack("<I", 99) + bytes(90), "unknown type", CorruptManifest),
    "an array": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 2**60) + bytes(90), "room", CorruptManifest),
    "nested arrays": (head(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(90), "array of arrays", StateMismatch),
    "dimensions": (head(tensors=1) + text("t") + struct.pack("<I", 2**31) + bytes(90), "dimensions", CorruptManifest),
    "a shape": (
        head(tensors=1) + text("t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + bytes(90),
        "shape",
        CorruptManifest,
    ),
    "a name twice": (head(tensors=2) + ENTRY + ENTRY + bytes(90), "one name", CorruptManifest),
    "a place": (head(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 4, 0, 2**40) + bytes(90), "beyond", CorruptManifest),
    "no multiple": (head(tensors=1) + text("t") + struct.pack("<IQIQ", 1, 4, 0, 1) + bytes(90), "multiple", CorruptManifest),
    "an alignment": (
        head(keys=1) + text("general.alignment") + struct.pack("<II", 4, 48) + bytes(90),
        "general.alignment",
        CorruptManifest,
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_claimed_is_checked(tmp_path: Path, what: str) -> None:
    """In little memory, whatever the claim."""
    data, says, error = BAD[what]
    tracemalloc.start()
    try:
        with pytest.raises(error, match=says):
            read(tmp_path, data)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(data) + 2**22
    finally:
        tracemalloc.stop()


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CorruptManifest, match="is missing"):
        reading.read(OnDisk(tmp_path), "m.gguf")


@pytest.mark.parametrize(
    ("places", "says"),
    [([(0, 40, "a"), (32, 8, "b")], "overlap"), ([(0, 32, "a"), (32, 33, "b")], "ends at byte 65")],
)
def test_places_of_tensors(places: list[tuple[int, int, str]], says: str) -> None:
    with pytest.raises(CorruptManifest, match=says) as refused:
        reading.check_places("m.gguf", 64, places)
    assert refused.value.members["tensor"] == "b"
    reading.check_places("m.gguf", 64, [(32, 32, "b"), (0, 32, "a")])

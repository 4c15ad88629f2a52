"""Arrays of zarr are read in any part, from chunks and shards of all forms, and damage is refused by file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard

from holdfast_formats.errors import CheckpointError, CorruptManifest, LimitExceeded, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.mapping import reading
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.region import Box
from holdfast_service.wings.convert.foreign.orbax import zarr
from holdfast_service.wings.convert.foreign.orbax.ocdbt import StoredValue
from tests.wings.convert.foreign.directories import OnDisk
from tests.wings.convert.foreign.orbax import files as by_hand
from tests.wings.convert.foreign.orbax.files import put

VALUES = np.random.default_rng(0).standard_normal((7, 5, 9)).astype(ml_dtypes.bfloat16)


def opened(directory: Path, files: Mapping[str, bytes], inline: bool = False) -> tuple[Files, ForeignTensor]:
    on_disk: Any = OnDisk(put(directory, files))
    stored = {name: StoredValue(name, 0, len(data), data if inline else None) for name, data in files.items()}
    return on_disk, zarr.tensor("model", "w", *zarr.read(on_disk, "w", stored))


@pytest.mark.parametrize("inline", [False, True], ids=["in files", "in the index"])
@pytest.mark.parametrize(
    "files",
    [
        by_hand.zarr("w", VALUES, (7, 5, 9)),
        by_hand.zarr("w", VALUES, (2, 5, 4)),
        by_hand.zarr("w", VALUES, (1, 2, 9), compressor=None),
        by_hand.zarr_3("w", VALUES, (4, 5, 9), (2, 5, 3)),
        by_hand.zarr_3("w", VALUES, (8, 6, 10), (1, 3, 5)),
    ],
    ids=["one chunk", "chunks", "plain", "shards", "one shard"],
)
def test_any_box(tmp_path: Path, files: Mapping[str, bytes], inline: bool) -> None:
    """Rows, columns, single elements and nothing, over the edges of chunks."""
    on_disk, tensor = opened(tmp_path, files, inline)
    fetch = partial(reading.fetched, on_disk)
    assert tensor.spec.dtype == "BF16"
    for offset, shape in [((0, 0, 0), (7, 5, 9)), ((1, 0, 3), (4, 5, 5)), ((6, 4, 8), (1, 1, 1)), ((3, 2, 0), (1, 3, 9)),
                          ((2, 2, 2), (0, 1, 1))]:  # fmt: skip
        box = Box(offset, shape)
        wanted = VALUES[tuple(slice(at, at + count) for at, count in zip(offset, shape, strict=True))]
        assert tensor.decoder is not None and tensor.decoder.decode(box, fetch).tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    "array",
    [np.float32(1.5), np.arange(6, dtype=np.int64), np.array([True, False]), np.zeros((0, 3), np.float16)],
    ids=["a number", "int64", "bool", "empty"],
)
def test_other_forms(tmp_path: Path, array: Any) -> None:
    array = np.asarray(array)
    on_disk, tensor = opened(tmp_path, by_hand.zarr("w", array, tuple(max(side, 1) for side in array.shape)))
    assert reading.fetched(on_disk, tensor).tobytes() == array.tobytes() and tensor.spec.shape == array.shape


def test_gzip_and_zeros(tmp_path: Path) -> None:
    """Chunks that are not stored are zeros; those of older programs are compressed by gzip."""
    array = np.zeros((4, 4), np.float32)
    array[2:] = 7
    files = by_hand.zarr("w", array, (2, 4), compressor=None)
    assert "w/0.0" not in files
    files["w/.zarray"] = files["w/.zarray"].replace(b'"compressor": null', b'"compressor": {"id": "gzip"}')
    files["w/1.0"] = gzip.compress(files["w/1.0"])
    on_disk, tensor = opened(tmp_path, files)
    assert reading.fetched(on_disk, tensor).tobytes() == array.tobytes()
    (tmp_path / "w/1.0").write_bytes(files["w/1.0"][:-9])
    with pytest.raises(CorruptManifest, match=r"w/1\.0"):
        reading.fetched(on_disk, tensor)


def test_a_bomb(tmp_path: Path) -> None:
    """A chunk of zeros that is a thousand times as long is not held in memory; what goes on beyond it is refused."""
    files = by_hand.zarr("w", np.ones(2**24, np.uint8), (2**24,))
    files["w/0"] = zstandard.compress(bytes(2**28))
    on_disk, tensor = opened(tmp_path, files)
    assert tensor.decoder is not None
    tracemalloc.start()
    try:
        assert not tensor.decoder.decode(Box((2**20,), (2**10,)), partial(reading.fetched, on_disk)).any()
        with pytest.raises(CorruptManifest, match="longer than its array"):
            reading.fetched(on_disk, tensor)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


PLAIN = by_hand.zarr("w", np.arange(4, dtype=np.int32), (2,))
SHARDS = by_hand.zarr_3("w", np.arange(1, 5, dtype=np.int32), (4,), (2,))


def altered(files: Mapping[str, bytes], **values: Any) -> dict[str, bytes]:
    name = next(name for name in files if name.endswith(("zarray", "zarr.json")))
    return {**files, name: json.dumps({**json.loads(files[name]), **values}).encode()}


ENDIAN = {"name": "bytes", "configuration": {"endian": "big"}}
BAD: dict[str, tuple[dict[str, bytes], str, type[CheckpointError]]] = {
    "no JSON": (PLAIN | {"w/.zarray": b"{"}, "cannot be read", CorruptManifest),
    "a list": (PLAIN | {"w/.zarray": b"[]"}, "not a JSON object", CorruptManifest),
    "large": (PLAIN | {"w/.zarray": bytes(zarr.METADATA_BYTES_MAX + 1)}, "over the limit", LimitExceeded),
    "a shape": (altered(PLAIN, shape=[-1]), "has the shape", CorruptManifest),
    "a chunk of nothing": (altered(PLAIN, chunks=[0]), "in chunks", CorruptManifest),
    "other axes": (altered(PLAIN, chunks=[2, 2]), "in chunks", CorruptManifest),
    "many chunks": (altered(PLAIN, shape=[2**40]), "chunks are over the limit", LimitExceeded),
    "by columns": (altered(PLAIN, order="F"), "not supported", StateMismatch),
    "big-endian": (altered(PLAIN, dtype=">i4"), "'>i4'", StateMismatch),
    "a dtype": (altered(SHARDS, data_type="int4"), "'int4'", StateMismatch),
    "blosc": (altered(PLAIN, compressor={"id": "blosc"}), "'blosc'", StateMismatch),
    "a number": (altered(by_hand.zarr("w", np.zeros(4, "i4"), (2,)), fill_value=3), "other numbers", StateMismatch),
    "codecs": (altered(SHARDS, codecs=[ENDIAN]), "codecs", StateMismatch),
    "a transposition": (altered(SHARDS, codecs=[{"name": "transpose"}]), "codecs", StateMismatch),
    "a grid": (altered(SHARDS, chunk_grid={"name": "rectangular"}), "chunk_grid", StateMismatch),
    "a shard": (altered(SHARDS, chunk_grid={"name": "regular", "configuration": {"chunk_shape": [3]}}), "in shards",
                CorruptManifest),
    "a short shard": (SHARDS | {"w/c/0": b"short"}, "no room", CorruptManifest),
    "an index": (SHARDS | {"w/c/0": SHARDS["w/c/0"][:-5] + bytes(5)}, "another CRC-32C", CorruptManifest),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    files, said, error = BAD[case]
    with pytest.raises(error, match=said) as refused:
        opened(tmp_path, files)
    assert error is not StateMismatch or refused.value.hint == zarr.LOAD


@pytest.mark.parametrize("data", [b"", b"none", zstandard.compress(b"few"), zstandard.compress(bytes(8))[:-1]])
def test_damaged_chunks(tmp_path: Path, data: bytes) -> None:
    on_disk, tensor = opened(tmp_path, PLAIN | {"w/1": data})
    with pytest.raises(CorruptManifest, match="w/1"):
        reading.fetched(on_disk, tensor)

"""OCDBT databases and zarr arrays by hand, as tensorstore writes them for Orbax."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from holdfast_service.wings.convert.foreign.orbax.ocdbt import crc32c

Array = np.ndarray[Any, Any]
DATA = "d/0123"
MAGIC, NODE = 0x0CDB3A2A, 0x0CDB20DE
INLINE_BYTES = 8


class At(NamedTuple):
    start: int
    size: int


def number(value: int) -> bytes:
    low = value & 0x7F
    return bytes([low | 0x80]) + number(value >> 7) if value > 0x7F else bytes([low])


def numbers(*values: int) -> bytes:
    return b"".join(map(number, values))


def block(magic: int, body: bytes, compressed: bool = True) -> bytes:
    body = numbers(0, int(compressed)) + (zstandard.compress(body) if compressed else body)
    sealed = struct.pack(">I", magic) + struct.pack("<Q", 12 + len(body) + 4) + body
    return sealed + struct.pack("<I", crc32c(sealed))


def keys(names: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Lengths of what each name shares with the one before and of the rest; then the rests."""
    shared = [_shared(one, other) for one, other in pairwise(names)]
    rests = [name[length:] for name, length in zip(names, [0, *shared], strict=True)]
    return numbers(*shared, *map(len, rests)), b"".join(rests)


def _shared(one: bytes, other: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def data_file(path: str = DATA, base: int = 0) -> bytes:
    return numbers(1, len(path), base) + path.encode()


def leaf(values: Mapping[str, bytes], places: Mapping[str, At], prefix: str = "", table: bytes | None = None) -> bytes:
    """A node with these values, or the places of them in the data file, without the prefix of its keys."""
    names = sorted(values)
    lengths, rests = keys([name[len(prefix) :].encode() for name in names])
    outside = [places[name] for name in names if name in places]
    body = b"\0" + (data_file() if table is None else table) + number(len(names)) + lengths + rests
    body += numbers(*(len(values[name]) for name in names)) + bytes(int(name in places) for name in names)
    body += numbers(*(0 for _ in outside), *(at.start for at in outside))
    return block(NODE, body + b"".join(values[name] for name in names if name not in places))


def inner(children: Mapping[str, At], height: int = 1) -> bytes:
    """A node above others, by the first key of each, all of which is common to the keys below."""
    names = sorted(children)
    lengths, rests = keys([name.encode() for name in names])
    places, none = [children[name] for name in names], [0] * len(names)
    body = bytes([height]) + data_file() + number(len(names)) + lengths + numbers(*map(len, names)) + rests
    body += numbers(*none, *(at.start for at in places), *(at.size for at in places), *none, *none, *none)
    return block(NODE, body)


def manifest(root: At, height: int = 0, kind: int = 0, table: bytes | None = None) -> bytes:
    body = bytes(16) + numbers(kind, INLINE_BYTES, 2**20) + b"\4" + number(0) + (data_file() if table is None else table)
    body += numbers(1, 1) + bytes([height]) + numbers(0, root.start, root.size, 0, 0, 0) + bytes(8) + number(0)
    return block(MAGIC, body)


def database(values: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a database with nodes of two levels."""
    data, places = b"", {}
    for name, value in values.items():
        if len(value) > INLINE_BYTES:
            places[name] = At(len(data), len(value))
            data += value
    children = {}
    for prefix in sorted({name.partition("/")[0] for name in values}):
        held = {name: value for name, value in values.items() if name.partition("/")[0] == prefix}
        node = leaf(held, places, prefix)
        children[prefix] = At(len(data), len(node))
        data += node
    root = inner(children)
    return {"manifest.ocdbt": manifest(At(len(data), len(root)), 1), DATA: data + root}


def zarr(name: str, array: Array, chunk: Sequence[int], compressor: str | None = "zstd") -> dict[str, bytes]:
    """An array of zarr 2 in chunks, of which those that are all zeros are not stored."""
    about = {"zarr_format": 2, "shape": list(array.shape), "chunks": list(chunk), "order": "C", "filters": None}
    about |= {"dtype": _dtype(array), "fill_value": None, "compressor": compressor and {"id": compressor, "level": 1}}
    found = {f"{name}/.zarray": json.dumps(about).encode()}
    for cell, data in _chunks(array, chunk):
        if any(data):
            found[f"{name}/{'.'.join(map(str, cell)) or '0'}"] = zstandard.compress(data) if compressor else data
    return found


def zarr_3(name: str, array: Array, shard: Sequence[int], chunk: Sequence[int]) -> dict[str, bytes]:
    """An array of zarr 3 in chunks within shards."""
    plain: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
    codecs = [plain, {"name": "zstd", "configuration": {"level": 1}}]
    inside = {"chunk_shape": list(chunk), "codecs": codecs, "index_codecs": [plain, {"name": "crc32c"}]}
    about = {"zarr_format": 3, "node_type": "array", "shape": list(array.shape), "data_type": array.dtype.name}
    about |= {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shard)}}, "fill_value": 0}
    about |= {"chunk_key_encoding": {"name": "default"}}
    about |= {"codecs": [{"name": "sharding_indexed", "configuration": inside}]}
    found = {f"{name}/zarr.json": json.dumps(about).encode()}
    for cell, data in _chunks(array, shard):
        stored, index = b"", b""
        for _, part in _chunks(np.frombuffer(data, array.dtype).reshape(shard), chunk):
            packed = zstandard.compress(part) if any(part) else b""
            index += struct.pack("<QQ", len(stored), len(packed)) if packed else b"\xff" * 16
            stored += packed
        found["/".join((name, "c", *map(str, cell)))] = stored + index + struct.pack("<I", crc32c(index))
    return found


def _dtype(array: Array) -> str:
    return "bfloat16" if array.dtype.name == "bfloat16" else array.dtype.str


def _chunks(array: Array, chunk: Sequence[int]) -> list[tuple[tuple[int, ...], bytes]]:
    """Cells of the grid with the bytes of their chunks, which are whole also at the edge."""
    found = []
    for cell in product(*(range(-(-size // step)) for size, step in zip(array.shape, chunk, strict=True))):
        part = array[tuple(slice(i * step, (i + 1) * step) for i, step in zip(cell, chunk, strict=True))]
        full = np.zeros(chunk, array.dtype)
        full[tuple(slice(0, size) for size in part.shape)] = part
        found.append((cell, full.tobytes()))
    return found


def tree(*names: str, complete: bool = False) -> dict[str, bytes]:
    """Orbax's `_METADATA` for these paths, joined with dots."""
    entries = {
        name: {"key_metadata": [{"key": key} for key in name.split(".")], "value_metadata": {"value_type": "jax.Array"}}
        for name in names
    }
    return {"_METADATA": json.dumps({"tree_metadata": entries, "store_array_data_equal_to_fill_value": complete}).encode()}


def put(directory: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory

"""Arrays of zarr, versions 2 and 3, as tensorstore writes them for Orbax: chunks of equal shape, each compressed by itself.

Chunks are decompressed from their beginning to what is needed: no more memory is taken than that, whatever their size.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import CorruptManifest, LimitExceeded, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping.listing import FetchBox, ForeignPiece, ForeignTensor
from holdfast_formats.region import Box, Shape, intersect, whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.orbax.ocdbt import AGAIN, StoredValue, crc32c

METADATA = (".zarray", "zarr.json")
METADATA_BYTES_MAX = 2**20
CHUNKS_MAX = 2**20
LOAD = "load it with the program that wrote it: orbax.checkpoint.PyTreeCheckpointer().restore(PATH), and save it again"
WINDOW_BYTES_MAX = 2**27
_PART_BYTES = 2**20
_NOWHERE = 2**64 - 1  # in a shard's index
_V2 = re.compile(r"[<|]([biufc])([1248]|16)")
_LETTERS = {"i": "I", "u": "U", "f": "F", "c": "C"}
_NAMED = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)},
}
_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_INDEX_CODECS = [_ENDIAN, {"name": "crc32c"}]

Values = Mapping[str, StoredValue]


class ChunkGrid(NamedTuple):
    """An array's dtype, shape, chunks and compression (empty, `zstd` or `gzip`), and how the keys of chunks are made.

    `shard` is the shape of a stored value, if it holds several chunks.
    """

    dtype: str
    shape: Shape
    chunk: Shape
    compression: str
    separator: str
    prefix: str = ""
    shard: Shape | None = None
    zero: bool = True  # what chunks hold that are not stored

    def cells(self, shape: Shape) -> Shape:
        return tuple(-(-size // step) for size, step in zip(self.shape, shape, strict=True))

    def key(self, cell: Sequence[int]) -> str:
        named = self.separator.join(map(str, cell))
        if not self.prefix:
            return named or "0"
        return f"{self.prefix}{self.separator}{named}" if named else self.prefix


class Chunks(NamedTuple):
    """The values of an array: of each chunk its compressed bytes in a file, or those themselves; None for zeros."""

    grid: ChunkGrid
    codes: tuple[ForeignTensor | bytes | None, ...]

    @property
    def inputs(self) -> tuple[ForeignTensor, ...]:
        return tuple(code for code in self.codes if isinstance(code, ForeignTensor))

    @property
    def terms(self) -> object:
        return self.grid, tuple(code if not isinstance(code, ForeignTensor) else "" for code in self.codes)

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        values = np.zeros(box.shape, dtypes.to_numpy(self.grid.dtype))
        if not box.volume:
            return values
        chunk, cells = self.grid.chunk, self.grid.cells(self.grid.chunk)
        sides = zip(box.offset, box.shape, chunk, strict=True)
        for cell in product(*(range(first // step, -(-(first + count) // step)) for first, count, step in sides)):
            held = Box(tuple(i * step for i, step in zip(cell, chunk, strict=True)), chunk)
            code = self.codes[sum(i * step for i, step in zip(cell, strides(cells), strict=True))]
            common = intersect(held, box)
            if common is not None and code is not None:
                values[_within(common.within(box))] = self._part(code, common.within(held), fetch)
        return values

    def _part(self, code: ForeignTensor | bytes, box: Box, fetch: FetchBox) -> NDArray[Any]:
        """A box of a chunk: rows of the first axis along which it has several elements, from which the rest is cut."""
        steps, dtype = strides(self.grid.chunk), dtypes.to_numpy(self.grid.dtype)
        axis = next((d for d, count in enumerate(box.shape) if count > 1), max(len(box.shape) - 1, 0))
        first = sum(i * step for i, step in zip(box.offset[: axis + 1], steps, strict=False))
        rows = (*box.shape[axis : axis + 1], *self.grid.chunk[axis + 1 :])
        start, count = first * dtype.itemsize, prod(rows) * dtype.itemsize
        data = _decoded(code, self.grid, start, count, fetch)
        beside = _within(Box(box.offset[axis + 1 :], box.shape[axis + 1 :]))
        return data.view(dtype).reshape(rows)[(slice(None), *beside) if rows else beside]


def read(files: Files, name: str, values: Values) -> tuple[ChunkGrid, tuple[StoredValue | None, ...]]:
    """An array's grid, and where its chunks are. `CorruptManifest` for invalid metadata and indexes, `StateMismatch` for
    what is not supported, `LimitExceeded` for too many chunks.
    """
    key = next(f"{name}/{ending}" for ending in METADATA if f"{name}/{ending}" in values)
    grid = _grid(key, _json(files, key, values[key]))
    cells = grid.cells(grid.chunk)
    if prod(cells) > CHUNKS_MAX:
        raise LimitExceeded(f"{key}: {prod(cells)} chunks are over the limit of {CHUNKS_MAX}", tensor=name)
    if grid.shard is None:
        found = [values.get(f"{name}/{grid.key(cell)}") for cell in product(*map(range, cells))]
    else:
        found = _sharded(files, name, values, grid, cells)
    if not grid.zero and None in found:
        raise StateMismatch(f"{key}: chunks are not stored, and stand for other numbers than 0", hint=LOAD, tensor=name)
    return grid, tuple(found)


def tensor(group: str, name: str, grid: ChunkGrid, stored: Sequence[StoredValue | None]) -> ForeignTensor:
    """The array as a tensor, whose chunks are decompressed when it is read."""
    codes = tuple(one if one is None else _code(name, one) for one in stored)
    return ForeignTensor(TensorSpec(group, name, grid.dtype, grid.shape), (), decoder=Chunks(grid, codes))


def _code(name: str, value: StoredValue) -> ForeignTensor | bytes:
    if value.inline is not None:
        return value.inline
    box = whole((value.size,))
    return ForeignTensor(TensorSpec("", name, "U8", box.shape), (ForeignPiece(value.file, value.start, box, (1,)),))


def _within(box: Box) -> tuple[Any, ...]:
    slices = (slice(first, first + count) for first, count in zip(box.offset, box.shape, strict=True))
    return (*slices, ...)


def _sharded(files: Files, name: str, values: Values, grid: ChunkGrid, cells: Shape) -> list[StoredValue | None]:
    assert grid.shard is not None
    found: list[StoredValue | None] = [None] * prod(cells)
    inner = tuple(whole_side // side for whole_side, side in zip(grid.shard, grid.chunk, strict=True))
    for cell in product(*map(range, grid.cells(grid.shard))):
        shard = values.get(f"{name}/{grid.key(cell)}")
        for place, value in _of_shard(files, name, shard, inner) if shard is not None else ():
            at = tuple(i * many + j for i, many, j in zip(cell, inner, place, strict=True))
            if all(i < count for i, count in zip(at, cells, strict=True)):
                found[sum(i * step for i, step in zip(at, strides(cells), strict=True))] = value
    return found


def _of_shard(files: Files, name: str, shard: StoredValue, inner: Shape) -> Iterator[tuple[Sequence[int], StoredValue]]:
    """The stored chunks of a shard, whose index is at its end."""
    length = prod(inner) * 16
    if prod(inner) > CHUNKS_MAX:
        raise LimitExceeded(f"{shard.file}: a shard of {name!r} has {prod(inner)} chunks", file=shard.file, tensor=name)
    if length + 4 > shard.size:
        raise _broken(shard.file, f"has no room for the index of a shard of {name!r}")
    data = shard.read(files, shard.size - length - 4, length + 4)
    if struct.pack("<I", crc32c(data[:-4])) != data[-4:]:
        raise _broken(shard.file, f"has a shard of {name!r}, whose index has another CRC-32C than it records")
    for place, (start, size) in zip(product(*map(range, inner)), struct.iter_unpack("<QQ", data[:-4]), strict=True):
        if (start, size) == (_NOWHERE, _NOWHERE):
            continue
        if start + size > shard.size:
            raise _broken(shard.file, f"has a shard of {name!r}, whose chunk ends beyond it")
        part = None if shard.inline is None else shard.inline[start : start + size]
        yield place, StoredValue(shard.file, shard.start + start, size, part)


def _decoded(code: ForeignTensor | bytes, grid: ChunkGrid, start: int, count: int, fetch: FetchBox) -> NDArray[Any]:
    """Bytes [start, start + count) of a decompressed chunk. `CorruptManifest` if it is shorter, or longer than a chunk."""
    into = np.empty(count, np.uint8)
    source = _Compressed(code, fetch)
    length = prod(grid.chunk) * dtypes.to_numpy(grid.dtype).itemsize
    where = code.pieces[0].file if isinstance(code, ForeignTensor) else "the index"
    try:
        with _stream(grid.compression, source) as stream:
            for skipped in range(0, start, _PART_BYTES):
                _fill(stream, np.empty(min(_PART_BYTES, start - skipped), np.uint8), where)
            _fill(stream, into, where)
            if start + count == length and stream.read(1):
                raise _broken(where, "has a chunk that is longer than its array says")
    except (zstandard.ZstdError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise _broken(where, f"has a chunk that cannot be decompressed: {error}") from error
    return into


def _stream(compression: str, source: io.RawIOBase) -> Any:
    buffered = io.BufferedReader(source, _PART_BYTES)
    if compression == "zstd":
        return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).stream_reader(buffered, read_size=_PART_BYTES)
    return gzip.GzipFile(fileobj=buffered) if compression else buffered


def _fill(stream: Any, into: NDArray[Any], where: str) -> None:
    view, at = into.data, 0
    while at < len(view):
        count = stream.readinto(view[at:])
        if not count:
            raise _broken(where, "has a chunk that is shorter than its array says")
        at += count


class _Compressed(io.RawIOBase):
    """The stored bytes of a chunk, as a stream."""

    def __init__(self, code: ForeignTensor | bytes, fetch: FetchBox) -> None:
        self._code, self._fetch, self._at = code, fetch, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = len(self._code) if isinstance(self._code, bytes) else self._code.spec.nbytes
        count = min(len(buffer), left - self._at)
        if isinstance(self._code, bytes):
            buffer[:count] = self._code[self._at : self._at + count]
        elif count:
            self._fetch(self._code, Box((self._at,), (count,)), np.frombuffer(buffer, np.uint8)[:count])
        self._at += count
        return count


def _broken(file: str, what: str) -> CorruptManifest:
    return CorruptManifest(f"{file} {what}", hint=AGAIN, file=file)


def _json(files: Files, key: str, value: StoredValue) -> dict[str, Any]:
    if value.size > METADATA_BYTES_MAX:
        raise LimitExceeded(f"{key} has {value.size} bytes, over the limit of {METADATA_BYTES_MAX}", file=value.file)
    try:
        document = json.loads(value.read(files, 0, value.size))
    except (ValueError, RecursionError) as error:
        raise _broken(value.file, f"has {key}, which cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise _broken(value.file, f"has {key}, which is not a JSON object")
    return document


def _grid(key: str, found: Mapping[str, Any]) -> ChunkGrid:
    if key.endswith(METADATA[0]):
        return _version_2(key, found)
    return _version_3(key, found)


def _version_2(key: str, found: Mapping[str, Any]) -> ChunkGrid:
    compressor, named = found.get("compressor"), found.get("dtype")
    compression = compressor.get("id") if isinstance(compressor, dict) else "" if compressor is None else compressor
    match = _V2.fullmatch(named) if isinstance(named, str) else None
    dtype = _NAMED.get(named) if isinstance(named, str) else None
    if match is not None:
        dtype = "BOOL" if match[1] == "b" else f"{_LETTERS[match[1]]}{8 * int(match[2])}"
    separator = found.get("dimension_separator", ".")
    plain = found.get("zarr_format") == 2 and found.get("filters") is None and found.get("order") == "C"
    if not plain or separator not in (".", "/"):
        raise _unknown(key, "filters, order or dimension_separator", found)
    sides = (_sides(key, found.get("shape")), _sides(key, found.get("chunks")))
    return _checked(key, ChunkGrid(_known(key, dtype, named), *sides, _method(key, compression), separator), found)


def _version_3(key: str, found: Mapping[str, Any]) -> ChunkGrid:
    chunks, keys = _part(found, "chunk_grid"), _part(found, "chunk_key_encoding")
    separator = keys.get("separator", "/" if keys.get("name") == "default" else ".")
    if chunks.get("name") != "regular" or keys.get("name") not in ("default", "v2") or separator not in (".", "/"):
        raise _unknown(key, "chunk_grid or chunk_key_encoding", found)
    shape, outer = _sides(key, found.get("shape")), _sides(key, chunks.get("chunk_shape"))
    codecs, shard, chunk = found.get("codecs"), None, outer
    if isinstance(codecs, list) and len(codecs) == 1 and _part({"": codecs[0]}, "").get("name") == "sharding_indexed":
        inner = _part({"": codecs[0]}, "")
        shard, chunk, codecs = outer, _sides(key, inner.get("chunk_shape")), inner.get("codecs")
        if inner.get("index_codecs") != _INDEX_CODECS or inner.get("index_location", "end") != "end":
            raise _unknown(key, "the index of shards", found)
        if len(chunk) != len(shard) or not all(n and not m % n for n, m in zip(chunk, shard, strict=True)):
            raise _broken(key, f"has chunks {list(chunk)} in shards {list(shard)}")
    prefix = "c" if keys.get("name") == "default" else ""
    named = found.get("data_type")
    dtype = _known(key, _NAMED.get(named) if isinstance(named, str) else None, named)
    grid = ChunkGrid(dtype, shape, chunk, _compression(key, codecs), separator, prefix, shard)
    return _checked(key, grid, found)


def _compression(key: str, codecs: Any) -> str:
    names = [_part({"": codec}, "").get("name") for codec in codecs] if isinstance(codecs, list) else []
    endian = _part({"": codecs[0]}, "").get("endian", "little") if names else None
    if names[:1] != ["bytes"] or endian != "little" or len(names) > 2:
        raise _unknown(key, "codecs", {"codecs": codecs})
    return _method(key, names[1]) if len(names) == 2 else ""


def _part(found: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A named part of zarr 3's metadata, with its configuration."""
    part = found.get(key)
    if not isinstance(part, dict):
        return {}
    configuration = part.get("configuration")
    return {**(configuration if isinstance(configuration, dict) else {}), "name": part.get("name")}


def _method(key: str, compression: Any) -> str:
    if compression not in ("", "zstd", "gzip"):
        raise StateMismatch(f"{key}: chunks are compressed by {compression!r}, which is not supported", hint=LOAD)
    return str(compression)


def _known(key: str, dtype: str | None, named: Any) -> str:
    if dtype not in dtypes.BITS:
        raise StateMismatch(f"{key}: the dtype {named!r} has no counterpart in safetensors", hint=LOAD)
    return str(dtype)


def _sides(key: str, found: Any) -> Shape:
    if not isinstance(found, list) or not all(type(side) is int and 0 <= side < 2**48 for side in found):
        raise _broken(key, f"has the shape {found!r}")
    return tuple(found)


def _checked(key: str, grid: ChunkGrid, found: Mapping[str, Any]) -> ChunkGrid:
    if len(grid.shape) != len(grid.chunk) or 0 in grid.chunk or prod(grid.shape) >= 2**48 or prod(grid.chunk) >= 2**48:
        raise _broken(key, f"has shape {list(grid.shape)} in chunks {list(grid.chunk)}")
    return grid._replace(zero=not found.get("fill_value"))


def _unknown(key: str, what: str, found: Mapping[str, Any]) -> StateMismatch:
    return StateMismatch(f"{key}: {what} are not supported: {json.dumps(found)[:400]}", hint=LOAD)

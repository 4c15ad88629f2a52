"""Reads the index of tensorstore's OCDBT format, of which nothing is trusted: a B+tree of keys.

A value is in a node of the tree, or in a data file. `tensorstore/kvstore/ocdbt/index.rst` describes the format.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from io import BytesIO
from typing import NamedTuple

import zstandard

from holdfast_files.opened import join
from holdfast_formats.errors import CorruptManifest, InvalidRequest, LimitExceeded, StateMismatch
from holdfast_formats.files import Files, split_path
from holdfast_service.wings.convert.foreign import file_signs

MANIFEST = "manifest.ocdbt"
AGAIN = "copy the checkpoint again: it is cut off or damaged"
INDEX_BYTES_MAX = 2**27  # of all nodes, and of all keys
NODE_BYTES_MAX = 2**26  # of one decoded node
KEYS_MAX = 2**20
NODES_MAX = 2**14  # tensorstore makes them of some MiB each
_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_UNCOMPRESSED, _ZSTD = 0, 1
_SAVE_AGAIN = "load it with Orbax (orbax.checkpoint.PyTreeCheckpointer().restore(PATH)), and save it again"
_MISSING = 2**64 - 1
_INLINE = 0


class StoredValue(NamedTuple):
    """Bytes of a file, or `inline` ones, which were in the index."""

    file: str
    start: int
    size: int
    inline: bytes | None = None

    def read(self, files: Files, start: int, count: int) -> bytes:
        """Bytes from `start` on; `CorruptManifest` if they are not there."""
        held = self.inline[start : start + count] if self.inline is not None else b""
        if self.inline is None and start + count <= self.size:
            held = files.read(self.file, self.start + start, count)
        if len(held) != count:
            raise CorruptManifest(f"{self.file} is cut off", hint=AGAIN, file=self.file)
        return held


def read(files: Files, directory: str = "") -> dict[str, StoredValue]:
    """All keys of the latest version. `CorruptManifest` for damage, `LimitExceeded` beyond any checkpoint's size,
    `StateMismatch` for a manifest in several files.
    """
    index = _Index(files, directory)
    index.read()
    return index.values


def crc32c(data: bytes) -> int:
    """The checksum of Castagnoli, in Python: for indexes, not for tensors."""
    table, value = _crc_table(), 0xFFFFFFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


@cache
def _crc_table() -> tuple[int, ...]:
    made = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        made.append(value)
    return tuple(made)


class _DataFile(NamedTuple):
    base: str  # before the paths of what its nodes refer to
    path: str


class _Reference(NamedTuple):
    data: _DataFile
    start: int
    bytes: int


class _Index:
    def __init__(self, files: Files, directory: str) -> None:
        self._files, self._directory = files, directory
        self._node_bytes = self._key_bytes = self._nodes = 0
        self.values: dict[str, StoredValue] = {}

    def read(self) -> None:
        path = join(self._directory, MANIFEST)
        size = self._files.size(path)
        if size is None:
            raise file_signs.absent(self._files, path)
        block = self._block(_Reference(_DataFile("", MANIFEST), 0, size), _MANIFEST_MAGIC)
        block.take(16)  # its UUID
        if block.number():
            raise StateMismatch(
                f"{path} is the head of a manifest in several files, which cannot be imported",
                hint=_SAVE_AGAIN,
                file=path,
            )
        block.numbers(2)
        block.take(1)
        if block.number():
            block.take(4)  # the compression's level
        data = self._data_files(block, "")
        count = block.count()
        block.numbers(count)
        heights = block.take(count)
        roots = self._references(block, data, count)
        if roots and (roots[-1].start, roots[-1].bytes) != (_MISSING, _MISSING):
            self._node(roots[-1], heights[-1], b"")

    def _node(self, at: _Reference, height: int, prefix: bytes) -> None:
        """Add the keys below a node; each is one level lower than what refers to it."""
        block = self._block(at, _NODE_MAGIC)
        if block.take(1)[0] != height:
            raise block.broken("has another height than its parent says")
        data = self._data_files(block, at.data.base)
        count = block.count()
        prefixes, suffixes = [0, *block.numbers(count - 1)], block.numbers(count)
        common = block.numbers(count) if height else []
        keys = self._keys(block, prefixes, suffixes)
        if height:
            for key, shared, child in zip(keys, common, self._references(block, data, count), strict=True):
                self._node(child, height - 1, prefix + key[:shared])
            return
        self._leaf(block, data, [prefix + key for key in keys])

    def _leaf(self, block: _Block, data: Sequence[_DataFile], keys: Sequence[bytes]) -> None:
        lengths = block.numbers(len(keys))
        kinds = block.take(len(keys))
        outside = sum(kind != _INLINE for kind in kinds)
        numbers, starts = block.numbers(outside), block.numbers(outside)
        places = zip(numbers, starts, strict=True)
        for key, length, kind in zip(keys, lengths, kinds, strict=True):
            name = block.text(key)
            self._key_bytes += len(key)
            if len(self.values) >= KEYS_MAX or self._key_bytes > INDEX_BYTES_MAX:
                raise LimitExceeded(f"{block.path} has more than {KEYS_MAX} keys, or too long ones", file=block.path)
            if kind == _INLINE:
                self.values[name] = StoredValue(block.path, 0, length, block.take(length))
                continue
            number, start = next(places)
            file = join(self._directory, block.of(data, number).path)
            if start + length > (self._files.size(file) or 0):
                raise CorruptManifest(f"{file} is missing or cut off: {name!r} is in it", hint=AGAIN, file=file)
            self.values[name] = StoredValue(file, start, length)

    def _keys(self, block: _Block, prefixes: Sequence[int], suffixes: Sequence[int]) -> list[bytes]:
        """Keys of which the beginning that is equal to the one before is not stored."""
        keys, last = [], b""
        for shared, length in zip(prefixes, suffixes, strict=True):
            if shared > len(last):
                raise block.broken("has a key that begins like more than the one before")
            last = last[:shared] + block.take(length)
            self._key_bytes += len(last)
            if self._key_bytes > INDEX_BYTES_MAX:
                raise LimitExceeded(f"{block.path} has keys of over {INDEX_BYTES_MAX} bytes", file=block.path)
            keys.append(last)
        return keys

    def _data_files(self, block: _Block, base: str) -> list[_DataFile]:
        count = block.number()
        if not count:
            return []
        if count > block.left:
            raise block.broken(f"claims {count} data files")
        prefixes, suffixes, bases = [0, *block.numbers(count - 1)], block.numbers(count), block.numbers(count)
        found = []
        for key, length in zip(self._keys(block, prefixes, suffixes), bases, strict=True):
            path = base + block.text(key)
            try:
                split_path(path)
            except InvalidRequest as error:
                raise block.broken(f"refers to {path!r}") from error
            found.append(_DataFile(base + block.text(key[:length]), path))
        return found

    def _references(self, block: _Block, data: Sequence[_DataFile], count: int) -> list[_Reference]:
        """Places of nodes, without their statistics."""
        numbers, starts, lengths = block.numbers(count), block.numbers(count), block.numbers(count)
        block.numbers(3 * count)
        places = zip(numbers, starts, lengths, strict=True)
        return [_Reference(block.of(data, number), start, length) for number, start, length in places]

    def _block(self, at: _Reference, magic: int) -> _Block:
        """Read a checked block, whose checksum is at its end."""
        path = join(self._directory, at.data.path)
        self._nodes += 1
        self._count(path, at.bytes)
        stored = self._files.read(path, at.start, at.bytes) if self._files.size(path) is not None else b""
        head = _Block(path, stored)
        if head.left != at.bytes or head.take(4) != struct.pack(">I", magic) or head.take(8) != struct.pack("<Q", at.bytes):
            raise head.broken("is not the block that refers to itself so")
        if struct.pack("<I", crc32c(stored[:-4])) != stored[-4:]:
            raise head.broken("has another CRC-32C than it records")
        version, method = head.numbers(2)
        if version or method not in (_UNCOMPRESSED, _ZSTD):
            what = f"{path} has version {version} and compression {method} of OCDBT"
            raise StateMismatch(what, hint=_SAVE_AGAIN, file=path)
        body = head.take(head.left - 4)
        if method == _ZSTD:
            try:
                body = zstandard.ZstdDecompressor().stream_reader(BytesIO(body)).read(NODE_BYTES_MAX + 1)
            except zstandard.ZstdError as error:
                raise head.broken(f"cannot be decompressed: {error}") from error
        if len(body) > NODE_BYTES_MAX:
            raise LimitExceeded(f"{path} has a node of over {NODE_BYTES_MAX} bytes", file=path)
        self._count(path, len(body))
        return _Block(path, body)

    def _count(self, path: str, size: int) -> None:
        self._node_bytes += size
        if self._node_bytes > INDEX_BYTES_MAX or self._nodes > NODES_MAX:
            what = f"{path}: the index has over {INDEX_BYTES_MAX} bytes, or over {NODES_MAX} nodes"
            raise LimitExceeded(what, file=path)


class _Block:
    """Bytes that are read from the first on."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self._data, self._at = path, data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def broken(self, what: str) -> CorruptManifest:
        return CorruptManifest(f"{self.path} {what}", hint=AGAIN, file=self.path)

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise self.broken("has an index that is cut off")
        found = self._data[self._at : self._at + count]
        self._at += count
        return found

    def number(self) -> int:
        """A whole number in LEB128."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise self.broken("has a number of more than 64 bits")

    def numbers(self, count: int) -> list[int]:
        return [self.number() for _ in range(count)]

    def count(self) -> int:
        """A number of things that each take more than a byte."""
        count = self.number()
        if not 0 < count <= self.left:
            raise self.broken(f"claims {count} entries")
        return count

    def text(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self.broken(f"has a name that is not UTF-8: {data[:80]!r}") from error

    def of(self, data: Sequence[_DataFile], number: int) -> _DataFile:
        if number >= len(data):
            raise self.broken(f"refers to data file {number} of {len(data)}")
        return data[number]

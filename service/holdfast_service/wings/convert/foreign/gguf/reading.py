"""Reads the header of a GGUF file, of which nothing is trusted: counts, lengths and places are checked before they are used.

Versions 2 and 3, little endian. `docs/gguf.md` of ggml describes them.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast_formats.errors import CorruptManifest, LimitExceeded, StateMismatch
from holdfast_formats.files import Files
from holdfast_formats.region import Shape
from holdfast_service.wings.convert.foreign import file_signs

MAGIC, VERSIONS = b"GGUF", (2, 3)
HEADER_BYTES_MAX = 2**26
TENSORS_MAX, KEYS_MAX, AXES_MAX, NAME_BYTES_MAX = 2**18, 2**16, 4, 2**10  # ggml has four axes
ITEMS_MAX = 2**20  # of an array; the largest vocabularies have a quarter of it
ALIGNMENT_KEY, ALIGNMENT_BYTES, ALIGNMENT_BYTES_MAX = "general.alignment", 32, 2**20
_PART_BYTES = 2**20
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_AGAIN = "download or copy it again: it is cut off or damaged"

Metadata = Mapping[str, Any]


class GgufTensor(NamedTuple):
    """A tensor's entry: its shape, row-major as torch has it, ggml's number of its type, and its first byte in the file."""

    name: str
    shape: Shape
    kind: int
    start: int


class GgufHeader(NamedTuple):
    """Metadata (numbers, texts, lists of them) and tensors, in the file's order."""

    metadata: Metadata
    tensors: tuple[GgufTensor, ...]


def read(files: Files, path: str) -> GgufHeader:
    """The header of a file. `CorruptManifest` for one that is cut off or contradicts itself, `StateMismatch` for another
    version, `LimitExceeded` beyond the size of any model's. Places of tensors are not compared with their lengths.
    """
    size = files.size(path)
    if size is None:
        raise file_signs.absent(files, path)
    file_signs.check_head(path, files.read(path, 0, file_signs.HEAD_BYTES))
    head = _Head(files, path, size)
    if head.take(len(MAGIC)) != MAGIC:
        raise head.broken("does not begin with GGUF")
    version = head.number("<I")
    if version not in VERSIONS:
        what = "big-endian" if version >> 16 else f"version {version}"
        raise StateMismatch(f"{path} is a GGUF file, {what}", hint="convert the model with a current llama.cpp", file=path)
    tensors, keys = head.count(TENSORS_MAX, 24, "tensors"), head.count(KEYS_MAX, 13, "keys")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = head.text(2**16)
        if key in metadata:
            raise head.broken(f"has the key {key!r} twice")
        metadata[key] = head.value(head.number("<I"))
    entries = [_entry(head) for _ in range(tensors)]
    if len({entry.name for entry in entries}) != len(entries):
        raise head.broken("has two tensors of one name")
    alignment = metadata.get(ALIGNMENT_KEY, ALIGNMENT_BYTES)
    if type(alignment) is not int or not 0 < alignment <= ALIGNMENT_BYTES_MAX or alignment & (alignment - 1):
        raise head.broken(f"has {ALIGNMENT_KEY} = {alignment!r}")
    data = head.at + -head.at % alignment
    if any(entry.start % alignment or data + entry.start > size for entry in entries):
        raise head.broken("has a tensor that begins beyond its end, or not at a multiple of its alignment")
    return GgufHeader(metadata, tuple(entry._replace(start=data + entry.start) for entry in entries))


def check_places(path: str, file_bytes: int, places: list[tuple[int, int, str]]) -> None:
    """`CorruptManifest` for tensors (start, bytes, name) that overlap or lead out of the file."""
    end, before = 0, ""
    for start, length, name in sorted(places):
        if start < end:
            raise CorruptManifest(f"{path}: {name!r} and {before!r} overlap", hint=_AGAIN, file=path, tensor=name)
        end, before = start + length, name
        if end > file_bytes:
            what = f"{path} has {file_bytes} bytes, but {name!r} ends at byte {end}"
            raise CorruptManifest(what, hint=_AGAIN, file=path, tensor=name)


def _entry(head: _Head) -> GgufTensor:
    name, axes = head.text(NAME_BYTES_MAX), head.number("<I")
    if axes > AXES_MAX:
        raise head.broken(f"has {axes} dimensions for {name!r}")
    shape = tuple(reversed([head.number("<Q") for _ in range(axes)]))
    if prod(shape) >= 2**48:
        raise head.broken(f"has shape {list(shape)} for {name!r}")
    return GgufTensor(name, shape, head.number("<I"), head.number("<Q"))


class _Head:
    """The bytes of a file from the first on, read in parts."""

    def __init__(self, files: Files, path: str, size: int) -> None:
        self._files, self._path, self._size = files, path, size
        self._part, self._part_at = b"", 0
        self.at = 0

    def broken(self, what: str) -> CorruptManifest:
        return CorruptManifest(f"{self._path} {what} (before byte {self.at})", hint=_AGAIN, file=self._path)

    def take(self, count: int) -> bytes:
        stop = self.at + count
        if stop > self._size:
            raise self.broken(f"is cut off: it has {self._size} bytes, and {stop} are needed")
        if stop > HEADER_BYTES_MAX:
            raise LimitExceeded(f"{self._path} has a header of over {HEADER_BYTES_MAX} bytes", file=self._path)
        if stop > self._part_at + len(self._part):
            self._part, self._part_at = self._files.read(self._path, self.at, max(count, _PART_BYTES)), self.at
            if len(self._part) < count:
                raise self.broken("became shorter while it was read")
        found = self._part[self.at - self._part_at : stop - self._part_at]
        self.at = stop
        return found

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def count(self, most: int, bytes_each: int, what: str) -> int:
        """A number of things that each take so many bytes at least: more than the file can hold are refused at once."""
        count = self.number("<Q")
        if count * bytes_each > self._size - self.at:
            raise self.broken(f"claims {count} {what}, more than it has room for")
        if count > most:
            raise LimitExceeded(f"{self._path} has {count} {what}, over the limit of {most}", file=self._path)
        return count

    def text(self, most: int = HEADER_BYTES_MAX) -> str:
        data = self.take(self.count(most, 1, "characters"))
        return data.decode("utf-8", "backslashreplace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        return self._numbers(kind, 1)[0].item()

    def _array(self) -> list[Any]:
        kind = self.number("<I")
        if kind == _STRING:
            return [self.text() for _ in range(self.count(ITEMS_MAX, 8, "texts"))]
        if kind == _ARRAY:
            raise StateMismatch(f"{self._path} has an array of arrays, which llama.cpp does not read", file=self._path)
        return list(self._numbers(kind, self.count(ITEMS_MAX, self._width(kind), "numbers")).tolist())

    def _width(self, kind: int) -> int:
        if kind not in _NUMBERS:
            raise self.broken(f"has a value of the unknown type {kind}")
        return np.dtype(_NUMBERS[kind]).itemsize

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        return np.frombuffer(self.take(count * self._width(kind)), _NUMBERS[kind])

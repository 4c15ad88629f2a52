"""Directories for the tests of DCP: read as an import reads them, and written as the executor of exports writes them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.files import Files
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping import box_moves, reading, target_files
from holdfast_formats.mapping.box_moves import MappedTensor
from holdfast_formats.mapping.listing import ForeignListing, ForeignPiece, ForeignTensor, TensorKey
from holdfast_formats.mapping.target_files import TargetFile
from holdfast_formats.region import whole
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign.pickled.dtypes import TORCH as NAMES


class DirectoryFiles:
    """The files below a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with open(self.root / path, "rb") as file:
            file.seek(offset)
            return file.read() if length is None else file.read(length)

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        with open(self.root / path, "rb", buffering=0) as file:
            file.seek(offset)
            return file.readinto(memoryview(buffer).cast("B"))  # type: ignore[no-any-return]

    def size(self, path: str) -> int | None:
        place = self.root / path
        return place.stat().st_size if place.is_file() else None

    def list(self, path: str) -> list[str]:
        place = self.root / path
        return sorted(one.name for one in place.iterdir()) if place.is_dir() else []


class Held:
    """Tensors in memory, as the files of one source: `tensors` describes them."""

    def __init__(self, values: Mapping[TensorKey, torch.Tensor]) -> None:
        self._data = {f"{key.group}:{key.name}": bytes_of(value) for key, value in values.items()}
        self.tensors = {key: _described(key, value) for key, value in values.items()}

    @property
    def mapped(self) -> list[MappedTensor]:
        return [box_moves.same(tensor) for tensor in self.tensors.values()]

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._data[path][offset:][:length]

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        data = self._data[path][offset : offset + buffer.nbytes]
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def size(self, path: str) -> int | None:
        return len(self._data[path])

    def list(self, path: str) -> list[str]:
        return sorted(self._data)


def _described(key: TensorKey, value: torch.Tensor) -> ForeignTensor:
    spec = TensorSpec(key.group, key.name, NAMES[str(value.dtype)], tuple(value.shape))
    return ForeignTensor(spec, (ForeignPiece(f"{key.group}:{key.name}", 0, whole(spec.shape), strides(spec.shape)),))


def write(root: Path, files: Iterable[TargetFile], source: Files, tensors: Mapping[TensorKey, ForeignTensor]) -> None:
    """Write target files."""
    for file in files:
        target_files.check(file)
        made, crcs = bytearray(file.bytes), {}
        for literal in file.literals:
            made[literal.start : literal.start + len(literal.data)] = literal.data
        for tensor, start in file.tensors:
            shape = tensor.spec.shape
            data = reading.elements(source, tensors, tensor, 0, int(np.prod(shape, dtype=np.int64))).tobytes()
            crcs[tensor.key] = zlib.crc32(data)
            made[start : start + len(data)] = data
        for literal in file.sealed(crcs) if file.sealed is not None else ():
            made[literal.start : literal.start + len(literal.data)] = literal.data
        (root / file.name).write_bytes(made)


def bytes_of(value: torch.Tensor) -> bytes:
    """A tensor's bytes, row-major."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read(root: Path, listing: ForeignListing, group: str, name: str) -> NDArray[Any]:
    """A tensor of a listing."""
    return reading.fetched(DirectoryFiles(root), listing.tensors[TensorKey(group, name)])


def assert_same(root: Path, listing: ForeignListing, group: str, wanted: Mapping[str, torch.Tensor]) -> None:
    """The group has exactly these tensors, with these bytes."""
    assert {key.name for key in listing.tensors if key.group == group} == set(wanted)
    for name, value in wanted.items():
        spec = listing.tensors[TensorKey(group, name)].spec
        assert (spec.dtype, spec.shape) == (NAMES[str(value.dtype)], tuple(value.shape)), name
        found = read(root, listing, group, name)
        assert found.dtype == dtypes.to_numpy(spec.dtype)
        assert found.tobytes() == bytes_of(value), name

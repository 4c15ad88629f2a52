"""The zips are those of `torch.save`: torch and zipfile read them, and elements of more than 4 GiB are where they say."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.mapping import target_files
from holdfast_formats.mapping.box_moves import MappedTensor, same
from holdfast_formats.mapping.listing import ForeignTensor
from holdfast_formats.tensors import TensorSpec
from holdfast_service.wings.convert.foreign import torch_zips
from tests.wings.convert.foreign.dcp.directories import bytes_of


def test_torch_and_zipfile_read_it() -> None:
    """The CRC-32 is the data's, and the data begin at a multiple of 64 bytes."""
    value = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    around = torch_zips.of_tensor(TensorSpec("model", "x", "I16", (2, 3)))
    data = bytes_of(value)
    made = around.head + data + around.tail(zlib.crc32(data))
    assert len(made) == around.total_bytes
    assert len(around.head) % 64 == 0
    assert zipfile.ZipFile(io.BytesIO(made)).testzip() is None
    assert torch.equal(torch.load(io.BytesIO(made), weights_only=True), value)
    wrong = around.head + data + around.tail(1)
    assert zipfile.ZipFile(io.BytesIO(wrong)).testzip() == "archive/data/0"


def test_over_four_gigabytes(tmp_path: Path) -> None:
    """Sizes and places that 32 bits do not hold; the file is sparse."""
    spec = TensorSpec("model", "x", "U8", (2**32 + 5,))
    around = torch_zips.of_tensor(spec)
    path = tmp_path / "x.pt"
    with open(path, "wb") as file:
        file.write(around.head)
        file.seek(around.data_bytes, 1)
        file.write(around.tail(7))
    assert path.stat().st_size == around.total_bytes
    found = {one.filename: one for one in zipfile.ZipFile(path).infolist()}
    assert found["archive/data/0"].file_size == 2**32 + 5
    assert found["archive/data/0"].CRC == 7
    value = torch.load(path, weights_only=True, mmap=True)
    assert value.shape == (2**32 + 5,)
    assert not value[-100:].any()


def test_values() -> None:
    """A value without tensors."""
    made = torch_zips.of_value({"a": (1, 2.5, None), "b": [True, b"x", {3}]})
    assert torch.load(io.BytesIO(made), weights_only=False) == {"a": (1, 2.5, None), "b": [True, b"x", {3}]}
    with pytest.raises(InvalidRequest, match="'y' is F4, for which torch has no dtype"):
        torch_zips.of_tensor(TensorSpec("model", "y", "F4", (2,)))


def test_a_value_around_a_tensor() -> None:
    """What has the tensor in it is loaded by torch as well."""
    around = torch_zips.of_tensor(TensorSpec("g", "x", "F32", (2,)), lambda tensor: {"a": [tensor], "n": 1})
    data = struct.pack("<2f", 1.5, -2.0)
    found = torch.load(io.BytesIO(around.head + data + around.tail(zlib.crc32(data))), weights_only=True)
    assert found["n"] == 1 and found["a"][0].tolist() == [1.5, -2.0]


def _mapped(name: str, dtype: str, shape: tuple[int, ...]) -> MappedTensor:
    return same(ForeignTensor(TensorSpec("optim", name, dtype, shape), ()))


def test_a_value_with_tensors(tmp_path: Path) -> None:
    """Each has a storage of its own, wherever it is; one has no elements."""
    values = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(7.0), "c": torch.zeros(0, 2).bfloat16()}
    held = {key: _mapped(key, "BF16" if key == "c" else "F32", tuple(one.shape)) for key, one in values.items()}
    file = torch_zips.file_of("x.pt", {"state": {0: {"a": held["a"]}, 1: [held["b"], (held["c"],)]}, "lr": 0.5})
    target_files.check(file)
    data = bytearray(file.bytes)
    crcs = {}
    for tensor in file.tensors:
        raw = bytes_of(values[tensor.mapped.spec.name])
        data[tensor.start : tensor.start + len(raw)] = raw
        crcs[tensor.mapped.key] = zlib.crc32(raw)
        assert tensor.start % 64 == 0
    assert file.sealed is not None
    for literal in (*file.literals, *file.sealed(crcs)):
        data[literal.start : literal.start + len(literal.data)] = literal.data
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert found["lr"] == 0.5 and torch.equal(found["state"][0]["a"], values["a"])
    assert found["state"][1][0] == 7 and found["state"][1][1][0].shape == (0, 2)
    with pytest.raises(InvalidRequest, match="'y' is F4"):
        torch_zips.file_of("x.pt", [_mapped("y", "F4", (2,))])


def test_tensors_behind_four_gigabytes(tmp_path: Path) -> None:
    """Their places have 64 bits. The file is sparse."""
    file = torch_zips.file_of("x.pt", [_mapped("a", "U8", (2**32 + 5,)), _mapped("b", "U8", (2,))])
    path = tmp_path / "x.pt"
    assert file.sealed is not None
    with open(path, "wb") as opened:
        for literal in (*file.literals, *file.sealed({tensor.mapped.key: 7 for tensor in file.tensors})):
            opened.seek(literal.start)
            opened.write(literal.data)
    assert path.stat().st_size == file.bytes
    found = {one.filename: one for one in zipfile.ZipFile(path).infolist()}
    last = found["archive/data/1"]
    assert (last.file_size, last.CRC) == (2, 7) and last.header_offset > 2**32
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded[0].shape == (2**32 + 5,) and loaded[-1].tolist() == [0, 0]


def test_more_tensors_than_sixteen_bits_count() -> None:
    """The directory's end has their number in 64 bits."""
    file = torch_zips.file_of("x.pt", [_mapped(str(number), "U8", (0,)) for number in range(2**16)])
    assert file.sealed is not None
    data = bytearray(file.bytes)
    for literal in (*file.literals, *file.sealed(dict.fromkeys((tensor.mapped.key for tensor in file.tensors), 0))):
        data[literal.start : literal.start + len(literal.data)] = literal.data
    assert len(zipfile.ZipFile(io.BytesIO(data)).infolist()) == 2**16 + 3

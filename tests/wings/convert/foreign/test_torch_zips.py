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

"""Pickles and torch files are read without running them: values, records and places of arrays, or a refusal by byte."""

from __future__ import annotations

import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_formats.foreign import pickles
from holdfast_formats.foreign.pickles import PickledArray, PickledGlobal


class OneFile:
    """A directory with one file, in memory."""

    def __init__(self, data: bytes, name: str = "f") -> None:
        self.data, self.name = data, name

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        assert path == self.name and offset >= 0
        return self.data[offset:][:length]

    def read_into(self, path: str, offset: int, buffer: Any) -> int:
        data = self.read(path, offset, buffer.nbytes)
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def size(self, path: str) -> int | None:
        return len(self.data) if path == self.name else None

    def list(self, path: str) -> list[str]:
        return [self.name]


def _values(data: bytes, array: PickledArray) -> NDArray[Any]:
    dtype = dtypes.to_numpy(array.dtype)
    reach = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) + 1 if 0 not in array.shape else 0
    held = np.frombuffer(data[array.offset :], f"u{dtype.itemsize}", reach)
    return as_strided(held, array.shape, [step * dtype.itemsize for step in array.strides]).view(dtype)


def _tensors() -> dict[str, Any]:
    chance = torch.Generator().manual_seed(1)
    base = torch.randn(6, 8, generator=chance)
    made = {
        "base": base,
        "turned": base.t()[2:, 1:3],
        "parameter": torch.nn.Parameter(base[0]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "expanded": base[:1].expand(4, 8),
    }
    kinds = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.int8, torch.bool)
    for kind in (*kinds, torch.uint16, torch.uint32, torch.int64):
        made[str(kind)] = base.abs().to(torch.float32).to(kind)
    return made


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_files_of_torch(tmp_path: Path, protocol: int, legacy: bool) -> None:
    """Tensors of any type and strides, shared storages and parameters are at the places that the reader says."""
    tensors = _tensors()
    state = OrderedDict(tensors, inner=[{"step": 3, "lr": 0.1}, (None, True)], kind=torch.float32, shape=torch.Size((2, 3)))
    torch.save(state, tmp_path / "f", pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    data = (tmp_path / "f").read_bytes()
    found = pickles.read_torch(OneFile(data), "f")
    assert list(found) == list(state)
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape)
        assert (
            _values(data, found[name]).tobytes() == tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    assert found["base"].storage == found["turned"].storage != found["scalar"].storage
    assert found["inner"] == [{"step": 3, "lr": 0.1}, (None, True)] and found["shape"] == (2, 3)
    assert found["kind"] == PickledGlobal("torch.float32")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_of_numpy(protocol: int) -> None:
    """Arrays are places, numpy's numbers are numbers; arrays in Fortran's order have its strides."""
    plain = np.arange(6, dtype="<i8").reshape(2, 3)
    data = pickle.dumps({"a": plain, "f": np.asfortranarray(plain), "n": np.float32(2.5), "b": np.uint8(200)}, protocol)
    found = pickles.read_pickle(OneFile(data), "f")
    assert (found["n"], found["b"]) == (2.5, 200)
    for name in ("a", "f"):
        np.testing.assert_array_equal(_values(data, found[name]), plain)
    assert found["f"].strides == (1, 2)


class _Runs:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function", [os.system, eval, getattr, print, open, random.seed])
def test_nothing_is_run(function: Any, tmp_path: Path) -> None:
    """A pickle that calls a function is refused by file and byte, wherever the call stands."""
    marker = tmp_path / "made"
    for protocol in (2, 4):
        data = pickle.dumps({"w": np.zeros(3), "x": [_Runs(function, f"touch {marker}")]}, protocol)
        with pytest.raises(StateMismatch, match=r"^f, byte \d+: the pickle (names|takes|calls)") as refused:
            pickles.read_pickle(OneFile(data), "f")
        assert refused.value.members["file"] == "f" and refused.value.hint
    assert not marker.exists()


def test_what_is_cut_off() -> None:
    """A file that ends anywhere but at its end is refused."""
    data = pickle.dumps({"w": np.arange(30), "t": "x" * 40}, 4)
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            pickles.read_pickle(OneFile(data[:length]), "f")
    with pytest.raises(StateMismatch, match="1 bytes follow it"):
        pickles.read_pickle(OneFile(data + b"."), "f")

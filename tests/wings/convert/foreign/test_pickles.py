"""Pickles and torch files are read without running them: values, records and places of arrays, or a refusal by byte."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from holdfast_formats import dtypes
from holdfast_formats.errors import CheckpointError, StateMismatch
from holdfast_formats.mapping import reading
from holdfast_formats.region import Box
from holdfast_service.wings.convert.foreign import pickles
from holdfast_service.wings.convert.foreign.pickles import (
    LatinArray,
    LatinDecoder,
    PickledArray,
    PickledBytes,
    PickledGlobal,
)
from tests.kit.files import FilesInMemory


def one_file(data: bytes) -> FilesInMemory:
    return FilesInMemory({"f": data})


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
    found = pickles.read_torch(one_file(data), "f")
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
    found = pickles.read_pickle(one_file(data), "f")
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
        with pytest.raises(StateMismatch, match=r"^f, byte \d+: the pickle (names|reads|calls)") as refused:
            pickles.read_pickle(one_file(data), "f")
        assert refused.value.members["file"] == "f" and refused.value.hint
    assert not marker.exists()


def test_what_is_cut_off() -> None:
    """A file that ends before its end, or goes on behind it, is refused."""
    data = pickle.dumps({"w": np.arange(30), "t": "x" * 40}, 4)
    for length in range(0, len(data), 3):
        with pytest.raises(CheckpointError):
            pickles.read_pickle(one_file(data[:length]), "f")
    with pytest.raises(StateMismatch, match="before the last 1 bytes"):
        pickles.read_pickle(one_file(data + b"."), "f")


def _saved(tmp_path: Path, **options: Any) -> bytes:
    torch.save({"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(2)}, tmp_path / "f", **options)
    return (tmp_path / "f").read_bytes()


def test_every_flipped_byte_of_a_torch_file(tmp_path: Path) -> None:
    """A zip file with any byte of its directory or headers changed gives places inside it, or is refused."""
    data = _saved(tmp_path)
    found = pickles.read_torch(one_file(data), "f")
    values = {byte for array in found.values() for byte in range(array.offset, array.offset + 4 * len(array.shape) * 3)}
    for at in range(0, len(data), 5):
        if at in values:
            continue
        with contextlib.suppress(CheckpointError):
            changed = data[:at] + bytes((data[at] ^ 0x41,)) + data[at + 1 :]
            again = pickles.read_torch(one_file(changed), "f")
            for array in again.values():
                _values(changed, array)  # raises where it is not in the file


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_torch_file_that_is_cut_off(tmp_path: Path, legacy: bool) -> None:
    """Shorter by any number of bytes, or longer, a file is refused."""
    data = _saved(tmp_path, _use_new_zipfile_serialization=not legacy)
    pickles.read_torch(one_file(data), "f")
    for length in range(0, len(data), 17):
        with pytest.raises(CheckpointError):
            pickles.read_torch(one_file(data[:length]), "f")
    with pytest.raises(CheckpointError):
        pickles.read_torch(one_file(data + b"more"), "f")


def _zip(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _members(tmp_path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(_saved(tmp_path))) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_what_else_a_zip_file_may_hold(tmp_path: Path) -> None:
    """Compressed, foreign, unused, missing, escaping and short members; programs of TorchScript; values of big machines."""
    members = _members(tmp_path)
    pickles.read_torch(one_file(_zip(members)), "f")
    kept = {name: content for name, content in members.items() if not name.endswith("data/0")}
    wrong = {
        "compressed": _zip(members, zipfile.ZIP_DEFLATED),
        "'f/more', which": _zip({**members, "f/more": b""}),
        "refers to its member 'f/data/7'": _zip({**members, "f/data/7": b""}),
        "storage '0', which is missing": _zip(kept),
        "has 3 bytes instead of 24": _zip({**kept, "f/data/0": b"abc"}),
        "outside the archive": _zip({**members, "f/../../x": b""}),
        "TorchScript|not written by torch.save": _zip({**members, "f/constants.pkl": b""}),
        "byte order": _zip({**members, "f/byteorder": b"big"}),
        "not have exactly one data.pkl": _zip({**members, "g/data.pkl": b""}),
    }
    for said, data in wrong.items():
        with pytest.raises(CheckpointError, match=said):
            pickles.read_torch(one_file(data), "f")


def test_programs_are_named_by_their_compressed_code(tmp_path: Path) -> None:
    """torch.jit.save compresses it; the way on is not to store the same program uncompressed."""
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), tmp_path / "f")
    with pytest.raises(CheckpointError) as refused:
        pickles.read_torch(one_file((tmp_path / "f").read_bytes()), "f")
    assert "torch.jit.load(FILE).state_dict()" in refused.value.hint


def test_members_that_share_bytes(tmp_path: Path) -> None:
    """Two members that overlap, or have one name, are refused: one of them would be read as the other."""
    data = bytearray(_zip(_members(tmp_path)))
    entries = [at for at in range(len(data)) if data[at : at + 4] == b"PK\x01\x02"]
    storages = [at for at in entries if b"/data/" in data[at : at + 60]]
    moved = bytearray(data)
    moved[storages[1] + 42 : storages[1] + 46] = moved[storages[0] + 42 : storages[0] + 46]
    with pytest.raises(CheckpointError, match="overlaps another"):
        pickles.read_torch(one_file(bytes(moved)), "f")
    named = bytes(data).replace(b"f/data/1", b"f/data/0")
    with pytest.raises(CheckpointError, match="two members"):
        pickles.read_torch(one_file(named), "f")


def test_a_zip_file_inside_a_file(tmp_path: Path) -> None:
    """A value that is a part of a file, as DCP has them, is read from there, and nothing outside of it."""
    data = _saved(tmp_path)
    inside = one_file(b"\xff" * 100 + data + b"\xff" * 50)
    found = pickles.read_torch(inside, "f", at=(100, len(data)))
    np.testing.assert_array_equal(_values(inside.files["f"], found["w"]), np.arange(6, dtype="f4").reshape(2, 3))
    for start, length in ((99, len(data)), (100, len(data) + 1), (100, len(data) + 51), (-1, 5), (10**9, 5)):
        with pytest.raises(CheckpointError):
            pickles.read_torch(inside, "f", at=(start, length))


class _Plain:
    def __init__(self) -> None:
        self.shape, self.inner = (2, 3), {"a": 1}


def test_records(tmp_path: Path) -> None:
    """Objects of classes that the caller allows are inert, by name, with the attributes they had; others are refused."""
    name = f"{_Plain.__module__}._Plain"
    for protocol in (2, 4):
        data = pickle.dumps([_Plain(), {"x": _Plain()}], protocol)
        found = pickles.read_pickle(one_file(data), "f", {name})
        assert found[0].name == name and found[0].get("shape") == (2, 3) and found[0].get("missing", 5) == 5
        assert found[1]["x"].get("inner") == {"a": 1} and repr(found[0]) == f"<{name}>"
        with pytest.raises(StateMismatch, match=rf"names '{name}'"):
            pickles.read_pickle(one_file(data), "f")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.array([None], dtype=object), "dtype 'O8', which no checkpoint can hold"),
        (np.array(["text"]), "dtype 'U4'"),
        (np.arange(3, dtype=">f4"), "byte order '>'"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "dtype|structures"),
        (np.array([1j]), "dtype 'c16'"),
        (np.longdouble(1), "dtype 'f16'"),
        (np.datetime64("2020-01-01"), "dtype"),
        (10**90, "integer of 38 bytes"),
        ({(1, (2, 3)): 1}, "has a key that is a tuple"),
        ({b"bytes": 1}, "has a key that is a bytes object"),
        (range(3), "names 'builtins.range'"),
    ],
    ids=lambda part: "",
)
def test_values_that_are_not_read(value: Any, said: str) -> None:
    """Types that no tensor file can hold, numbers that are too long, keys that could take long, by file and byte."""
    with pytest.raises(StateMismatch, match=rf"^f, byte \d+: the pickle .*({said})"):
        pickles.read_pickle(one_file(pickle.dumps([value], 4)), "f")


@pytest.mark.parametrize(
    "value",
    [torch.eye(2).to_sparse(), torch.complex(torch.ones(2), torch.ones(2)).conj(), torch.ones(2, device="meta")],
    ids=["sparse", "conjugated", "meta"],
)
def test_tensors_that_are_no_plain_ones(tmp_path: Path, value: torch.Tensor) -> None:
    """Sparse, conjugated and empty-handed tensors hold their values in ways of their own, and are refused."""
    torch.save({"w": value}, tmp_path / "f")
    with pytest.raises(StateMismatch, match=r"^f, byte \d+: the pickle"):
        pickles.read_torch(one_file((tmp_path / "f").read_bytes()), "f")


def test_arrays_as_text() -> None:
    """Protocol 2 has bytes as text: an array whose bytes are not ASCII is no place of bytes, and never taken for one."""
    plain, other = np.arange(6, dtype="u1"), np.arange(250, 256, dtype="u1")
    data = pickle.dumps({"plain": plain, "other": other}, 2)
    found = pickles.read_pickle(one_file(data), "f")
    np.testing.assert_array_equal(_values(data, found["plain"]), plain)
    assert isinstance(found["other"], LatinArray) and found["other"].shape == (6,)
    held = data[found["other"].offset :][: found["other"].length]
    assert held.decode().encode("latin1") == other.tobytes()


@pytest.mark.parametrize(
    "damaged", [b"\xc3a\x80", b"\xc4\x80a", b"\x80\xc2\xa0", b"ab\xc2", b"\xc3\xa9", b"\xe0\xa0\x80abc"]
)
def test_arrays_as_damaged_text(damaged: bytes) -> None:
    """Text that no Latin-1 text has as its UTF-8 is refused when it is read, as is one of another length."""
    files = one_file(damaged)
    decoder = LatinDecoder(LatinArray("U8", (2,), (1,), 0, len(damaged), "f"), "U8")
    with pytest.raises(StateMismatch, match=r"^f: the array at byte 0 (is not stored as bytes|has 1 bytes instead of 2)"):
        decoder.decode(Box((1,), (1,)), partial(reading.fetched, files))


def test_numbers_of_numpy() -> None:
    """Single numbers of numpy's types are Python's own, also complex ones of two doubles."""
    numbers = [np.float64(0.1), np.float32(1.5), np.int64(-5), np.uint8(200), np.bool_(True), np.complex128(1 - 2j)]
    for protocol in (2, 4):
        assert pickles.read_pickle(one_file(pickle.dumps(numbers, protocol)), "f") == [one.item() for one in numbers]


def test_long_texts_are_stepped_over() -> None:
    """A text of over a megabyte becomes its place; one as a key is refused."""
    text = "é" * 700_000
    found = pickles.read_pickle(one_file(pickle.dumps([text], 4)), "f")
    assert isinstance(found[0], PickledBytes) and found[0].length == 1_400_000
    with pytest.raises(StateMismatch, match="has a key that is a bytes object"):
        pickles.read_pickle(one_file(pickle.dumps({text: 1}, 4)), "f")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_tensor_is_bounded_by_its_storage(tmp_path: Path, legacy: bool) -> None:
    """Steps of zero would make gigabytes of a few bytes: what has more bytes than its storage is refused."""
    for tensor in (torch.zeros(2).expand(2**33, 2), torch.as_strided(torch.zeros(8), (7, 2), (1, 1))):
        torch.save({"x": tensor}, tmp_path / "f", _use_new_zipfile_serialization=not legacy)
        with pytest.raises(StateMismatch, match="whose elements share bytes"):
            pickles.read_torch(one_file((tmp_path / "f").read_bytes()), "f")


def test_members_of_a_zip_are_found_with_few_reads(tmp_path: Path) -> None:
    """Of each member its header and, of a small one, its content: files with tens of thousands of members are usual."""
    torch.save({f"w{number}": torch.full((1,), float(number)) for number in range(100)}, tmp_path / "f")
    files = one_file((tmp_path / "f").read_bytes())
    pickles.read_torch(files, "f")
    assert len(files.reads) < 2 * 100 + 20

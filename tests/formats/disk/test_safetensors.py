"""safetensors: our header against the library's own output, and everything that must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors as library
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import torch as library_torch

from holdfast_formats.disk import packing, safetensors
from holdfast_formats.disk.safetensors import FileTensor
from holdfast_formats.errors import CorruptManifest, LimitExceeded, StateMismatch
from tests.checkpoints import dtype_name
from tests.formats.strategies import NAMES, content, file_bytes, shapes, specs, stored

TORCH_DTYPES = {**library_torch._TYPES, "F8_E8M0": torch.float8_e8m0fnu, "F4": torch.float4_e2m1fn_x2}
METADATA = st.none() | st.dictionaries(NAMES, st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=3)


def framed(header: bytes, data: bytes = b"") -> bytes:
    """A file with this header, whatever it says."""
    return len(header).to_bytes(8, "little") + header + data


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def written(document: object, data: bytes = b"") -> bytes:
    return framed(json.dumps(document).encode(), data)


def as_library_writes(file: bytes) -> bool:
    """Whether our encoder gives back, byte for byte, the header that the library wrote."""
    header = safetensors.decode(file, len(file))
    encoded = safetensors.encode(header.tensors, header.metadata, 8)
    return encoded == file[: header.header_bytes]


def zeros(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of zero bytes, for every dtype that torch has (two F4 stand in one of its elements)."""
    kind = TORCH_DTYPES[dtype]
    shape = (*shape, 1) if dtype == "F4" else shape
    return torch.zeros((*shape, kind.itemsize), dtype=torch.uint8).view(kind).reshape(shape)


def in_library_order(file: bytes, shuffled: list[tuple[str, str]]) -> bool:
    order = [(t.name, t.dtype) for t in safetensors.decode(file, len(file)).tensors]
    return [shuffled[i] for i in safetensors.storage_order(shuffled)] == order


@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(TORCH_DTYPES)), shapes(3, 3)), max_size=8), METADATA, st.data()
)
def test_header_is_the_torch_librarys(
    table: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None, data: st.DataObject
) -> None:
    """For tables of every dtype torch can write, decode and encode give the library's header, and its storage order."""
    assume(table or metadata is None)  # with metadata alone, the library (0.8) writes a header that it cannot read itself
    tensors = {name: zeros(dtype, shape) for name, (dtype, shape) in table.items()}
    file = library_torch.save(tensors, metadata)
    assert as_library_writes(file)
    assert in_library_order(file, data.draw(st.permutations([(name, dtype) for name, (dtype, _) in table.items()])))


@given(specs())
def test_the_library_reads_our_files(tensors: list) -> None:
    """Files with 4 KiB headers give the library the same names, dtypes, shapes and bytes that went in."""
    for plan in packing.pack(tensors, 40):
        read = dict(library.deserialize(file_bytes(plan)))
        assert len(plan.header) % safetensors.DATA_ALIGNMENT_BYTES == 0
        assert set(read) == {spec.name for spec, _ in plan.tensors}
        for spec, _ in plan.tensors:
            found = read[spec.name]
            assert (found["dtype"], tuple(found["shape"])) == (spec.dtype, spec.shape)
            assert bytes(found["data"]) == content(spec)


def test_torch_and_safe_open_read_our_file(tmp_path: Path) -> None:
    """torch.load's counterpart and the memory-mapped reader see the values that numpy wrote, and {"format": "pt"}."""
    values = {"w": np.arange(6, dtype="<f4").reshape(2, 3), "n": np.array(7, "<i8"), "none": np.zeros((0, 3), "<f4")}
    names = sorted(values)
    order = safetensors.storage_order([(n, dtype_name(values[n].dtype)) for n in names])
    table = stored(*((names[i], dtype_name(values[names[i]].dtype), values[names[i]].shape) for i in order))
    file = safetensors.encode(table, {"format": "pt"}) + b"".join(values[t.name].tobytes() for t in table)
    loaded = library_torch.load(file)
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {n: v.tolist() for n, v in values.items()}
    (tmp_path / "x.safetensors").write_bytes(file)
    with library.safe_open(tmp_path / "x.safetensors", "np") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert all(np.array_equal(opened.get_tensor(name), values[name]) for name in names)


def test_decode_states_what_the_file_holds() -> None:
    """Tensors come by ascending offset, an empty one before the tensor that begins at the same byte."""
    document = {"b": entry(), "a": entry(shape=[0, 9], offsets=[0, 0]), "__metadata__": {"k": "v"}}
    file = written(document, b"1234")
    header = safetensors.decode(file, len(file))
    assert header.tensors == (FileTensor("a", "F32", (0, 9), 0, 0), FileTensor("b", "F32", (1,), 0, 4))
    assert header.metadata == {"k": "v"}
    assert header.header_bytes == len(file) - 4


GOOD = written({"w": entry()}, b"1234")


@pytest.mark.parametrize("length", range(len(GOOD)))
def test_a_file_cut_at_any_byte_is_refused(length: int) -> None:
    """Whichever byte a file ends at too early, the header says so; so does a file with bytes too many."""
    with pytest.raises(CorruptManifest, match=r"w\.safetensors"):
        safetensors.decode(GOOD[:length], length, "w.safetensors")
    with pytest.raises(CorruptManifest, match=r"bytes, but its header describes|cut off"):
        safetensors.decode(GOOD, len(GOOD) + 1 + length)


def test_a_head_shorter_than_the_header_is_refused() -> None:
    """The file is whole but the caller has read too little of it."""
    with pytest.raises(CorruptManifest, match="cut off inside its header"):
        safetensors.decode(GOOD[:20], len(GOOD))


BROKEN: dict[str, tuple[bytes, str]] = {
    "overlap": (written({"a": entry(), "b": entry(offsets=[2, 6])}, b"123456"), "do not follow"),
    "same bytes twice": (written({"a": entry(), "b": entry()}, b"1234"), "do not follow"),
    "hole": (written({"a": entry(), "b": entry(offsets=[8, 12])}, b"x" * 12), "do not follow"),
    "hole at the beginning": (written({"a": entry(offsets=[4, 8])}, b"x" * 8), "do not follow"),
    "backwards": (written({"a": entry(offsets=[0, -4])}), "do not follow"),
    "negative": (written({"a": entry(offsets=[-4, 0])}), "do not follow"),
    "wrong size": (written({"a": entry(shape=[2])}, b"1234"), "4 bytes for F32"),
    "trailing bytes": (written({"a": entry()}, b"12345"), "bytes, but its header describes"),
    "negative shape": (written({"a": entry(shape=[-1, -1])}, b"1234"), "negative size"),
    "too large": (written({"a": entry(shape=[2**40, 2**40], offsets=[0, 2**82])}), "too large"),
    "half a byte": (written({"a": entry("F4", [1], [0, 1])}, b"1"), "do not fill whole bytes"),
    "unknown dtype": (written({"a": entry("F31")}, b"1234"), "unknown dtype"),
    "unknown field": (written({"a": {**entry(), "more": 1}}, b"1234"), "inconsistent header"),
    "missing field": (written({"a": {"dtype": "F32"}}), "inconsistent header"),
    "fraction": (written({"a": entry(shape=[1.0])}, b"1234"), "inconsistent header"),
    "boolean": (written({"a": entry(shape=[True])}, b"1234"), "inconsistent header"),
    "metadata not text": (written({"__metadata__": {"a": 1}}), "inconsistent header"),
    "half a surrogate in metadata": (written({"__metadata__": {"a": "\ud800"}}), "not valid Unicode"),
    "half a surrogate in a name": (written({"\ud800": entry()}, b"1234"), "Unicode"),
    "duplicate name": (framed(b'{"a":1,"b":2,"a":3}'), "duplicate key 'a'"),
    "duplicate field": (framed(b'{"a":{"dtype":"F32","dtype":"I32","shape":[0],"data_offsets":[0,0]}}'), "duplicate key"),
    "not UTF-8": (framed(b'{"\xff":1}'), "not JSON"),
    "UTF-16": (framed("{}".encode("utf-16")), "not JSON"),
    "byte order mark": (framed(b"\xef\xbb\xbf{}"), "not JSON"),
    "two documents": (framed(b"{}{}"), "not JSON"),
    "padded with zeros": (framed(b"{}\0\0"), "not JSON"),
    "empty": (framed(b""), "not JSON"),
    "a list": (framed(b"[]"), "does not begin"),
    "a number": (framed(b"7"), "does not begin"),
    "spaces first": (framed(b" {}"), "does not begin"),
    "deep": (framed(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "not JSON"),
    "huge number": (framed(b'{"a":' + b"9" * 5000 + b"}"), "not JSON"),
    "longer than the file": ((1000).to_bytes(8, "little") + b"{}", "claims a header of 1000"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_refused(case: str) -> None:
    """Every header that does not describe its file exactly is refused, and the refusal says why and names the file."""
    file, reason = BROKEN[case]
    with pytest.raises(CorruptManifest, match=reason) as caught:
        safetensors.decode(file, len(file), "the-file")
    assert caught.value.members == {"file": "the-file"}
    assert "the-file" in caught.value.detail
    assert caught.value.hint


@given(specs(), st.data())
def test_what_we_accept_the_library_accepts(tensors: list, data: st.DataObject) -> None:
    """One changed byte in the header: we refuse it by name, or the library reads the same tensors out of it."""
    for plan in packing.pack(tensors)[:1]:
        file = bytearray(file_bytes(plan))
        used = len(plan.header.rstrip())
        file[data.draw(st.integers(0, used - 1))] = data.draw(st.integers(0, 255))
        try:
            header = safetensors.decode(bytes(file), len(file))
        except CorruptManifest:
            continue
        read = dict(library.deserialize(bytes(file)))
        assert {t.name: (t.dtype, list(t.shape)) for t in header.tensors} == {
            name: (found["dtype"], list(found["shape"])) for name, found in read.items()
        }


@given(st.binary(max_size=60))
def test_random_bytes_give_named_errors(data: bytes) -> None:
    """Noise as a file, and noise as a header, is refused and never an accident."""
    for file in (data, framed(data), framed(b'{"a":' + data + b"}")):
        try:
            safetensors.decode(file, len(file))
        except CorruptManifest:
            continue
        assert file[8:9] == b"{"  # only a JSON object can have passed


def test_an_oversized_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No header over the library's limit is believed, whatever the file's size, and none is written."""
    limit = safetensors.HEADER_BYTES_MAX
    with pytest.raises(CorruptManifest, match="claims a header"):
        safetensors.header_length((limit + 1).to_bytes(8, "little"), 2**40)
    assert safetensors.header_length(limit.to_bytes(8, "little"), 2**40) == limit
    monkeypatch.setattr(safetensors, "HEADER_BYTES_MAX", 100)
    with pytest.raises(LimitExceeded, match="over the format's limit") as caught:
        safetensors.encode(stored(("a", "F32", (1,)), ("b", "F32", (1,))))
    assert "file_bytes_max" in caught.value.hint


@pytest.mark.parametrize(
    "change",
    [
        lambda table: [table[0], table[0]._replace(start=4, stop=8)],
        lambda table: [table[0]._replace(name="__metadata__")],
        lambda table: [table[0]._replace(name="\ud800")],
        lambda table: [table[0]._replace(dtype="F31")],
        lambda table: [table[0]._replace(stop=5)],
        lambda table: list(reversed(table)),
    ],
)
def test_encode_refuses_what_decode_refuses(change: Callable[[list[FileTensor]], list[FileTensor]]) -> None:
    """A table that would not read back is not written."""
    table = stored(("a", "F32", (1,)), ("b", "F32", (1,)))
    with pytest.raises(StateMismatch):
        safetensors.encode(change(table))

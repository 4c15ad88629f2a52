"""Shards as files: the header, and any window of the bytes, against what numpy and the safetensors library make of them."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast_formats import dtypes, transfer
from holdfast_formats.errors import StateMismatch
from holdfast_formats.layout import parts, shard_file
from holdfast_formats.layout.parts import LocalTensor, Part
from holdfast_formats.layout.shard_file import ShardFile
from holdfast_formats.region import Box, byte_view, whole
from tests.local_tensors import fill, padded

Arrays = dict[str, NDArray[Any]]
METADATA = {"rank": "3"}
SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
DTYPES = st.sampled_from(["U8", "I16", "F32", "I64"])


@st.composite
def locals_(draw: st.DrawFn) -> tuple[list[LocalTensor], Arrays]:
    """Local tensors of many kinds, and the stored tensors that they are made of, in which no byte is zero."""
    stored: Arrays = {}
    made: list[LocalTensor] = []
    for i in range(draw(st.integers(0, 5))):
        shape, dtype = draw(SHAPES), draw(DTYPES)
        kind = draw(st.sampled_from(["box", "padded", "flat", "fused", "interleaved", "scalar", "empty"]))
        for side in "ab":
            octets = draw(st.binary(min_size=8, max_size=8)).replace(b"\0", b"\1")
            flat = np.resize(np.frombuffer(octets, np.uint8), prod(shape) * dtypes.bits(dtype) // 8)
            stored[f"{i}{side}"] = flat.view(dtypes.to_numpy(dtype)).reshape(shape)
        pair = [(f"{i}a", whole(shape)), (f"{i}b", whole(shape))]
        stop = tuple(draw(st.integers(1, n)) for n in shape)
        offset = tuple(draw(st.integers(0, n - 1)) for n in stop)
        box = Box(offset, tuple(n - o for n, o in zip(stop, offset, strict=True)))
        match kind:
            case "box":
                local = parts.of_box(str(i), dtype, f"{i}a", box)
            case "padded":
                local = padded(parts.of_box(str(i), dtype, f"{i}a", box), box.shape[0] + 3)
            case "flat":
                whole_one = parts.full(f"{i}a", dtype, shape)
                start = draw(st.integers(0, whole_one.volume))
                local = parts.flat(whole_one, start, draw(st.integers(start, whole_one.volume)))._replace(name=str(i))
            case "fused":
                local = parts.fuse(str(i), dtype, pair, len(shape) - 1, 1)
            case "interleaved":
                local = parts.fuse(str(i), dtype, pair, 0, shape[0])
            case "scalar":
                stored[f"{i}a"] = stored[f"{i}a"].reshape(-1)[:1].reshape(())
                local = parts.full(f"{i}a", dtype, ())
            case _:
                local = LocalTensor(str(i), dtype, (0, 3), ())
        made.append(local)
    return made, stored


def lay_out(tensors: list[LocalTensor], stored: Arrays) -> ShardFile:
    return shard_file.lay_out(tensors, {name: array.shape for name, array in stored.items()}, METADATA)


def window(file: ShardFile, stored: Arrays, low: int, high: int) -> bytes:
    """What the window's strips say, put together from arrays in memory."""
    memory = np.full(high - low, 0xEE, np.uint8)
    for strip in shard_file.strips(file, low, high):
        units = memory[strip.at : strip.stop].view(transfer.element_dtype(strip.itemsize))
        if strip.is_padded:
            units[:] = 0
        for part in strip.parts:
            source = np.ascontiguousarray(stored[part.tensor])
            as_units = source.reshape(-1).view(units.dtype).reshape(source.shape)
            parts.view(units, part)[...] = as_units[part.box.slices]
    return memory.tobytes()


def whole_file(file: ShardFile, stored: Arrays, window_bytes: int) -> bytes:
    spans = shard_file.windows(file, 0, file.bytes, window_bytes)
    return file.header + b"".join(window(file, stored, low, high) for low, high in spans)


@given(locals_(), st.integers(1, 6))
def test_the_file_is_what_the_library_writes(made: tuple[list[LocalTensor], Arrays], eighths: int) -> None:
    """Windows of any size, one behind the other, are the data of a file that the library reads as numpy does."""
    tensors, stored = made
    file = lay_out(tensors, stored)
    data = whole_file(file, stored, 8 * eighths)
    assert len(data) == file.bytes
    assert file.header[8:].startswith(b'{"__metadata__":{"format":"pt","rank":"3"}')
    read = safetensors.numpy.load(data)
    assert set(read) == {local.name for local in tensors}
    for local in tensors:
        expected = fill(local, stored) if local.parts else np.zeros(local.shape, dtypes.to_numpy(local.dtype))
        assert read[local.name].shape == local.shape
        assert read[local.name].tobytes() == expected.tobytes()


@given(st.data(), locals_())
def test_windows_cover_any_range_and_no_more_than_they_must(
    data: st.DataObject, made: tuple[list[LocalTensor], Arrays]
) -> None:
    """Windows follow each other over a range, cut at multiples of their size, and hold the file's bytes."""
    tensors, stored = made
    file = lay_out(tensors, stored)
    every = whole_file(file, stored, 2**20)
    start = data.draw(st.integers(0, file.bytes))
    stop = data.draw(st.integers(start, file.bytes))
    spans = list(shard_file.windows(file, start, stop, 64))
    got = file.header[start:stop]
    for low, high in spans:
        assert 0 < high - low <= 64 and (high % 64 == 0 or (low, high) == spans[-1])
        got += window(file, stored, low, high)[max(start - low, 0) : max(stop - low, 0)]
    assert got == every[start:stop]
    if spans:
        assert spans[0][0] > max(start, len(file.header)) - 8
        assert spans[-1][1] < stop + 8


def packed(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[LocalTensor, NDArray[np.uint8]]:
    """A whole tensor of elements narrower than a byte, and its bytes as they can be addressed."""
    view = byte_view(dtype, shape)
    return parts.full(name, dtype, shape), np.arange(1, 1 + prod(view.shape), dtype=np.uint8).reshape(view.shape)


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (6, 4)), ("F6_E2M3", (3, 8)), ("F4", (4, 3)), ("F6_E3M2", (4, 2, 1))])
def test_narrow_elements_are_sent_whole(dtype: str, shape: tuple[int, ...]) -> None:
    """A tensor of elements narrower than a byte is its bytes, also where its rows do not end at one."""
    local, octets = packed("t", dtype, shape)
    file = shard_file.lay_out([local], {"t": shape}, {})
    assert whole_file(file, {"t": octets}, 8)[len(file.header) :] == octets.tobytes()


def test_narrow_elements_are_cut_between_bytes() -> None:
    """Rows, and columns that begin and end at a byte, are cut; two tensors are fused."""
    _, octets = packed("t", "F4", (6, 8))
    rows = parts.of_box("rows", "F4", "t", Box((2, 0), (3, 8)))
    columns = parts.of_box("columns", "F4", "t", Box((0, 2), (6, 4)))
    both = parts.fuse("both", "F4", [("t", whole((6, 8))), ("t", Box((0, 0), (6, 8)))], 1, 2)
    file = shard_file.lay_out([rows, columns, both], {"t": (6, 8)}, {})
    expected = {
        "rows": octets[2:5],
        "columns": octets[:, 1:3],
        "both": np.concatenate([octets[:, :2], octets[:, :2], octets[:, 2:], octets[:, 2:]], axis=1),
    }
    data = whole_file(file, {"t": octets}, 8)
    for placed in file.tensors:
        assert data[placed.start : placed.stop] == expected[placed.local.name].tobytes()


@pytest.mark.parametrize(
    "part",
    [
        Part("t", Box((0, 1), (6, 2)), 0, (2, 1)),  # begins inside a byte of the stored tensor
        Part("t", Box((0, 0), (6, 2)), 1, (4, 1)),  # begins inside one of the local
        Part("t", Box((0, 0), (6, 2)), 0, (3, 1)),  # its second row does
        Part("u", whole((4, 3)), 1, (3, 1)),  # a whole tensor that does
    ],
)
def test_narrow_elements_are_not_cut_inside_a_byte(part: Part) -> None:
    """A part that would begin or end inside a byte is refused by name."""
    local = LocalTensor("x", "F4", (40,), (part,))
    with pytest.raises(StateMismatch, match=f"'{part.tensor}'"):
        shard_file.lay_out([local], {"t": (6, 8), "u": (4, 3)}, {})


def test_what_no_file_can_hold() -> None:
    """Two tensors of one name, and elements that do not end at a byte, are refused."""
    with pytest.raises(StateMismatch, match="distinct"):
        shard_file.lay_out([parts.full("t", "U8", (2,)), parts.full("t", "U8", (3,))], {"t": (3,)}, {})
    with pytest.raises(StateMismatch, match="'t'"):
        shard_file.lay_out([parts.full("t", "F4", (3,))], {"t": (3,)}, {})

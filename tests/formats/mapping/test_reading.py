"""Boxes of foreign tensors are read exactly, wherever their elements stand, and moved to where a map says."""

from __future__ import annotations

from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from holdfast_formats import dtypes, transfer
from holdfast_formats.errors import CorruptManifest, StateMismatch
from holdfast_formats.layout.parts import strides
from holdfast_formats.mapping import box_moves, reading
from holdfast_formats.mapping.box_moves import BoxMove, MappedTensor
from holdfast_formats.mapping.listing import FetchBox, ForeignPiece, ForeignTensor, TensorKey
from holdfast_formats.region import Box, whole
from holdfast_formats.tensors import TensorSpec
from tests.kit.files import FilesInMemory


def _stored(
    values: NDArray[Any], name: str = "x", cut: int = 0, order: tuple[int, ...] = ()
) -> tuple[FilesInMemory, ForeignTensor]:
    """A tensor whose rows before and after `cut` are in two files, each with its dimensions in memory in this order."""
    order = order or tuple(range(values.ndim))
    spec = TensorSpec("model", name, "F32", values.shape)
    pieces, files = [], {}
    for number, (low, high) in enumerate(((0, cut), (cut, len(values)))):
        part = values[low:high]
        turned = np.ascontiguousarray(part.transpose(order))
        steps = strides(turned.shape)
        box = Box((low, *(0,) * (values.ndim - 1)), part.shape)
        pieces.append(ForeignPiece(f"f{number}", 7, box, tuple(steps[order.index(d)] for d in range(values.ndim))))
        files[f"f{number}"] = b"\1" * 7 + turned.tobytes()
    return FilesInMemory(files), ForeignTensor(spec, tuple(pieces))


def _values(shape: tuple[int, ...]) -> NDArray[Any]:
    return np.arange(prod(shape), dtype="<f4").reshape(shape)


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
def test_any_box_of_any_order_is_exact(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """A box is the same as its slice of the whole, for pieces in any order of dimensions, and after a transposition."""
    values = _values(shape)
    order = data.draw(st.permutations(range(len(shape)))).copy()
    files, tensor = _stored(values, cut=data.draw(st.integers(0, shape[0])), order=tuple(order))
    low = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(low, tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, low, strict=True)))
    np.testing.assert_array_equal(reading.fetched(files, tensor, box), values[box.slices])
    axes = tuple(data.draw(st.permutations(range(len(shape)))))
    mapped = box_moves.permuted(tensor, axes)
    box_moves.check(mapped, {tensor.key: tensor.spec})
    start = data.draw(st.integers(0, values.size))
    stop = data.draw(st.integers(start, values.size))
    wanted = values.transpose(axes).reshape(-1)[start:stop]
    np.testing.assert_array_equal(reading.elements(files, {tensor.key: tensor}, mapped, start, stop), wanted)


def test_stacked_and_sliced_and_padded() -> None:
    """Two matrices become one of three dimensions, one of them turned, with a row of zeros; and a row of it a vector."""
    a, b = _values((2, 3)), _values((3, 2)) + 100
    files_a, one = _stored(a, "a")
    files_b, two = _stored(b, "b")
    files = FilesInMemory({"f1": files_a.files["f1"], "g": files_b.files["f1"], "f0": b""})
    two = two._replace(pieces=tuple(piece._replace(file="g") for piece in two.pieces if piece.box.volume))
    tensors = {one.key: one, two.key: two}
    specs = {key: tensor.spec for key, tensor in tensors.items()}
    stack = MappedTensor(
        TensorSpec("model", "s", "F32", (2, 3, 3)),
        (
            BoxMove(one.key, whole((2, 3)), Box((0, 0, 0), (1, 2, 3)), (None, 0, 1)),
            BoxMove(two.key, whole((3, 2)), Box((1, 0, 0), (1, 2, 3)), (None, 1, 0)),
        ),
        padded=True,
    )
    box_moves.check(stack, specs)
    wanted = np.zeros((2, 3, 3), "f4")
    wanted[0, :2], wanted[1, :2] = a, b.T
    for start in range(18):
        np.testing.assert_array_equal(reading.elements(files, tensors, stack, start, 18), wanted.reshape(-1)[start:])
    row = MappedTensor(TensorSpec("model", "r", "F32", (3,)), (BoxMove(one.key, Box((1, 0), (1, 3)), whole((3,)), (1,)),))
    box_moves.check(row, specs)
    np.testing.assert_array_equal(reading.elements(files, tensors, row, 0, 3), a[1])
    with pytest.raises(StateMismatch, match="6 elements of tensor 's' would not be written"):
        box_moves.check(stack._replace(padded=False), specs)
    with pytest.raises(StateMismatch, match="written twice"):
        box_moves.check(stack._replace(moves=stack.moves * 2), specs)
    with pytest.raises(StateMismatch, match="which is missing"):
        box_moves.check(row, {})
    for axes in permutations((0, 1, None)):
        if axes != (None, 0, 1):
            with pytest.raises(StateMismatch, match="does not fill"):
                box_moves.check(stack._replace(moves=(stack.moves[0]._replace(axes=axes), stack.moves[1])), specs)


def test_a_tensor_of_no_dimensions() -> None:
    """Its element is read, moved and converted; it comes out of a tensor of more dimensions, and goes into one."""
    files = FilesInMemory({"f": np.array([1.5, 2.5], "<f4").tobytes()})
    scalar = ForeignTensor(TensorSpec("model", "s", "F32", ()), (ForeignPiece("f", 4, whole(()), ()),))
    pair = ForeignTensor(TensorSpec("model", "p", "F32", (2,)), (ForeignPiece("f", 0, whole((2,)), (1,)),))
    assert reading.fetched(files, scalar)[()] == 2.5
    tensors = {scalar.key: scalar, pair.key: pair}
    for dtype in ("F32", "F64", "BF16"):
        found = reading.elements(files, tensors, box_moves.same(scalar, dtype=dtype), 0, 1)
        assert found.dtype == dtypes.to_numpy(dtype) and found.tolist() == [2.5]
    out = BoxMove(pair.key, Box((1,), (1,)), whole(()), ())
    assert reading.elements(files, tensors, MappedTensor(TensorSpec("model", "o", "F32", ()), (out,)), 0, 1).tolist() == [
        2.5
    ]
    into = BoxMove(scalar.key, whole(()), Box((0,), (1,)), (None,))
    assert reading.elements(files, tensors, MappedTensor(TensorSpec("model", "i", "F32", (1,)), (into,)), 0, 1).tolist() == [
        2.5
    ]


def test_rounded_to_the_nearest_even() -> None:
    """F32 becomes BF16 by rounding, not by dropping bits; numbers of another kind are refused."""
    values = np.array([1.0, 1.00390625, 1.01171875, 3.3895314e38], "<f4")
    files, tensor = _stored(values)
    mapped = box_moves.same(tensor, dtype="BF16")
    found = reading.elements(files, {tensor.key: tensor}, mapped, 0, 4)
    assert found.view("<u2").tolist() == [0x3F80, 0x3F80, 0x3F82, 0x7F7F]
    with pytest.raises(StateMismatch, match="cannot be converted from float32 to int32"):
        reading.elements(files, {tensor.key: tensor}, box_moves.same(tensor, dtype="I32"), 0, 4)


@pytest.mark.parametrize("dtype", sorted(set(dtypes.BITS) - {"F4", "F6_E2M3", "F6_E3M2"}))
def test_every_type_in_another_order(dtype: str) -> None:
    """A transposed matrix of any type is read as it is."""
    values = np.arange(12).reshape(3, 4).astype(dtypes.to_numpy(dtype))
    files = FilesInMemory({"f": np.ascontiguousarray(values.T).tobytes()})
    tensor = ForeignTensor(TensorSpec("model", "x", dtype, (3, 4)), (ForeignPiece("f", 0, whole((3, 4)), (1, 3)),))
    assert reading.fetched(files, tensor).tobytes() == values.tobytes()


def test_spans_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large transposed matrix, a band is read in spans of a bounded length, and far gaps are not read at all."""
    monkeypatch.setattr(reading, "SPAN_BYTES_MAX", 2**16)
    values = _values((512, 600))
    files, tensor = _stored(values)
    np.testing.assert_array_equal(reading.fetched(files, tensor, Box((0, 5), (512, 7))), values[:, 5:12])
    assert max(length for _, _, length in files.reads) <= 2**16
    files.reads.clear()
    reading.elements(files, {tensor.key: tensor}, box_moves.permuted(tensor, (1, 0)), 0, 512 * 300)
    assert max(length for _, _, length in files.reads) <= 2**16
    assert sum(length for _, _, length in files.reads) <= 2 * values.nbytes


def test_a_single_number() -> None:
    """A tensor without dimensions, such as an optimizer's step: as it is, converted, and as an element of a vector."""
    files = FilesInMemory({"f": np.float32(2.5).tobytes()})
    step = ForeignTensor(TensorSpec("optim", "step", "F32", ()), (ForeignPiece("f", 0, whole(()), ()),))
    tensors = {step.key: step}
    assert reading.fetched(files, step) == np.float32(2.5)
    assert reading.elements(files, tensors, box_moves.same(step), 0, 1).tolist() == [2.5]
    assert reading.elements(files, tensors, box_moves.same(step, dtype="F64"), 0, 1).tolist() == [2.5]
    one = MappedTensor(TensorSpec("optim", "v", "F32", (1,)), (BoxMove(step.key, whole(()), whole((1,)), (None,)),))
    assert reading.elements(files, tensors, one, 0, 1).tolist() == [2.5]


def test_what_is_missing_is_refused() -> None:
    """A file that became shorter, and a box that no piece has."""
    files, tensor = _stored(_values((4, 4)))
    files.files["f1"] = files.files["f1"][:-1]
    with pytest.raises(CorruptManifest, match="f1 was truncated"):
        reading.fetched(files, tensor)
    with pytest.raises(StateMismatch, match="16 elements of tensor 'x' are in no file"):
        reading.fetched(files, tensor._replace(pieces=()))


class _Halved:
    def __init__(self, stored: ForeignTensor) -> None:
        self.inputs = (stored,)

    def decode(self, box: Box, fetch: FetchBox) -> NDArray[Any]:
        halved: NDArray[Any] = fetch(self.inputs[0], box) / np.float32(2)
        return halved


def test_decoded_tensors_are_moved_as_others() -> None:
    """A tensor that is computed is read by box, and mapped, like one that is stored."""
    values = _values((3, 4))
    files, stored = _stored(values)
    decoded = ForeignTensor(TensorSpec("optim", "y", "F32", (3, 4)), (), decoder=_Halved(stored))
    assert decoded.key == TensorKey("optim", "y")
    mapped = box_moves.permuted(decoded, (1, 0), TensorKey("optim", "z"))
    found = reading.elements(files, {decoded.key: decoded}, mapped, 2, 9)
    np.testing.assert_array_equal(found, (values / 2).T.reshape(-1)[2:9])
    assert found.dtype == dtypes.to_numpy("F32")


@given(data=st.data(), cut=st.integers(0, 12))
def test_elements_that_are_steps_apart_are_exact(data: st.DataObject, cut: int) -> None:
    """A move with steps, of source and target: any stretch of the tensor is what numpy's strided slices make."""
    values = _values((12, 3))
    files, tensor = _stored(values, cut=cut, order=tuple(data.draw(st.permutations(range(2)))))
    step, target_step = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, 11 // step + 1))
    first = data.draw(st.integers(0, 11 - (count - 1) * step))
    rows = (count - 1) * target_step + 1
    wanted = np.zeros((3, rows), "<f4")
    wanted[:, ::target_step] = values[first : first + (count - 1) * step + 1 : step].T
    move = BoxMove(tensor.key, Box((first, 0), (count, 3)), Box((0, 0), (3, count)), (1, 0), (step, 1), (1, target_step))
    mapped = MappedTensor(TensorSpec("model", "y", "F32", (3, rows)), (move,), padded=True)
    box_moves.check(mapped, {tensor.key: tensor.spec})
    start = data.draw(st.integers(0, 3 * rows))
    stop = data.draw(st.integers(start, 3 * rows))
    made = reading.elements(files, {tensor.key: tensor}, mapped, start, stop)
    np.testing.assert_array_equal(made, wanted.reshape(-1)[start:stop])


def test_steps_are_checked_as_boxes_are() -> None:
    """Rows that interleave do not overlap; those that meet are refused, and so is what leaves the source."""
    spec = TensorSpec("model", "x", "F32", (4, 2))
    sources = {TensorKey("model", "x"): spec}

    def mapped(*firsts: int, step: int = 1) -> MappedTensor:
        placed = (
            BoxMove(TensorKey("model", "x"), Box((0, 0), (2, 2)), Box((first, 0), (2, 2)), (0, 1), (step, 1), (2, 1))
            for first in firsts
        )
        return MappedTensor(TensorSpec("model", "y", "F32", (4, 2)), tuple(placed))

    box_moves.check(mapped(0, 1), sources)
    with pytest.raises(StateMismatch, match="written twice"):
        box_moves.check(mapped(0, 0), sources)
    with pytest.raises(StateMismatch, match="outside shape"):
        box_moves.check(mapped(0, 2), sources)
    with pytest.raises(StateMismatch, match="outside shape"):
        box_moves.check(mapped(0, 1, step=4), sources)


@pytest.mark.parametrize("shape", [(70, 130), (130, 3, 70), (3, 200, 64), (65, 64, 2, 1)])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "U8"])
@pytest.mark.parametrize("built", [True, False])
def test_long_tensors_are_transposed(
    shape: tuple[int, ...], dtype: str, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever dimensions change places, in C and in strips, the last of which is shorter: all elements arrive."""
    if not built:
        monkeypatch.setattr(transfer, "_library", None)
    values = np.random.default_rng(1).integers(0, 256, (*shape, dtypes.to_numpy(dtype).itemsize), np.uint8)
    for axes in permutations(range(len(shape))):
        held = values.view(f"u{values.shape[-1]}")[..., 0]
        into = np.zeros(tuple(shape[axis] for axis in axes), held.dtype)
        reading.assign(into, held.transpose(axes), "w")
        assert into.tobytes() == np.ascontiguousarray(held.transpose(axes)).tobytes()
        back = np.zeros(shape, held.dtype)
        reading.assign(back.transpose(axes), into, "w")
        assert back.tobytes() == held.tobytes()

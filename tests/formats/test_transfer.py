"""transfer: gathering boxes into extents and scattering extents into boxes, against numpy slicing; and copies of arrays,
those of transposed matrices in C."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import transfer
from holdfast_formats.region import Box, Shape
from holdfast_formats.transfer import Direction, element_dtype, move

from .strategies import shape_and_grid


@given(shape_and_grid(), st.sampled_from([1, 2, 4, 8]), st.data())
def test_gather_and_scatter_are_numpy_slicing(case: tuple[Shape, list[Box]], itemsize: int, data: st.DataObject) -> None:
    """Boxes of any grid fill extents of any cut with the tensor's bytes, and other boxes are filled from them again."""
    shape, grid = case
    tensor = np.arange(1, prod(shape) + 1).astype(element_dtype(itemsize)).reshape(shape)
    cuts = sorted([0, tensor.size, *data.draw(st.lists(st.integers(0, tensor.size), max_size=3))])
    extents = [np.zeros(stop - start, tensor.dtype) for start, stop in pairwise(cuts)]

    copied = 0
    for box in grid:
        held = np.array(tensor[box.slices])
        copied += sum(move(Direction.GATHER, e, s, held, box, shape) for e, s in zip(extents, cuts, strict=False))
    assert copied == tensor.size
    assert np.concatenate(extents).tobytes() == tensor.tobytes()

    for box in grid:
        held = np.zeros(box.shape, tensor.dtype)
        count = sum(move(Direction.SCATTER, e, s, held, box, shape) for e, s in zip(extents, cuts, strict=False))
        assert count == box.volume
        assert np.array_equal(held, tensor[box.slices])


def test_a_scalar_is_moved_both_ways() -> None:
    """A 0-d tensor has one element, which goes into its extent and back."""
    extent, scalar = np.zeros(1, "<u4"), Box((), ())
    assert move(Direction.GATHER, extent, 0, np.array(7, "<u4"), scalar, ()) == 1
    held = np.zeros((), "<u4")
    assert move(Direction.SCATTER, extent, 0, held, scalar, ()) == 1
    assert int(held) == 7


def test_what_an_extent_does_not_hold_is_left_alone() -> None:
    """An extent that has nothing in common with a box moves nothing; one with a part changes that part only."""
    held = np.full((2, 2), 9, "<u2")
    box = Box((1, 1), (2, 2))  # elements 4, 5, 7, 8 of a 3 x 3 tensor
    assert move(Direction.SCATTER, np.zeros(4, "<u2"), 0, held, box, (3, 3)) == 0
    assert move(Direction.SCATTER, np.array([5, 6, 7], "<u2"), 5, held, box, (3, 3)) == 2
    assert held.tolist() == [[9, 5], [7, 9]]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_elements_are_moved_by_width(itemsize: int) -> None:
    """The copying type is as wide as the element and little-endian, whatever the element means."""
    assert element_dtype(itemsize).itemsize == itemsize
    assert element_dtype(itemsize).kind == "u"


needs_library = pytest.mark.skipif(not (transfer._library is not None), reason="native_transpose.c was not built here")


def matrix(dtype: str, rows: int, columns: int, begin: int, more: int) -> np.ndarray:
    """A matrix that begins anywhere in memory, with `more` elements after each row, and a row of others at both ends."""
    step, size = columns + more, np.dtype(dtype).itemsize
    octets = np.random.default_rng(rows).integers(0, 256, ((rows + 2) * step + begin) * size + 64, np.uint8)
    first = -(octets.ctypes.data + step * size) % 64 + begin * size
    return octets[first : first + (rows + 2) * step * size].view(dtype).reshape(rows + 2, step)


SIDES, BEGINS, GAPS = st.integers(64, 200), st.sampled_from([0, 0, 1, 5]), st.sampled_from([0, 0, 3, 64])


@needs_library
@given(st.sampled_from(["u1", "<u2", "<f4", "<i8"]), SIDES, SIDES, st.tuples(BEGINS, BEGINS), st.tuples(GAPS, GAPS))
def test_it_is_the_copy_of_numpy(
    dtype: str, rows: int, columns: int, begins: tuple[int, int], gaps: tuple[int, int]
) -> None:
    """Into rows as of rows, and nothing between the rows of the target changes."""
    source = matrix(dtype, columns, rows, begins[0], gaps[0])[1:-1, :rows]
    for turned in (False, True):
        around = matrix(dtype, rows, columns, begins[1], gaps[1])
        expected = around.copy()
        expected[1:-1, :columns] = source.T
        target = around[1:-1, :columns]
        transfer.copy(*((target.T, source) if turned else (target, source.T)))
        assert around.tobytes() == expected.tobytes()


@pytest.mark.parametrize("library", [True, False])
def test_any_other_arrays_are_copied_too(monkeypatch: pytest.MonkeyPatch, library: bool) -> None:
    if not library:
        monkeypatch.setattr(transfer, "_library", None)
    values = np.arange(32 * 64 * 128, dtype=np.int32).reshape(32, 64, 128)
    few = (values[0, :3, :2].T, values[0, 0, 0])
    for source in (values.T, values[0], values[:, 0, :].T, values[:, ::2, 3], values[0][::-1].T, *few):
        target = np.zeros(np.shape(source), np.int32)
        transfer.copy(target, source)
        assert np.array_equal(target, source)
    target = np.zeros((64, 128), np.complex128)
    transfer.copy(target, (values[0] * 1j).reshape(128, 64).T)
    assert np.array_equal(target, (values[0] * 1j).reshape(128, 64).T)


def test_a_target_that_cannot_be_written_is_refused() -> None:
    target = np.zeros((100, 100), np.float32)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        transfer.copy(target, np.ones((100, 100), np.float32).T)


def test_a_library_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Such as one for another machine."""
    broken = tmp_path_factory.mktemp("library") / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(transfer, "LIBRARY", broken)
    assert transfer._load() is None

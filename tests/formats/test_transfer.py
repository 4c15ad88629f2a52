"""transfer: gathering boxes into extents and scattering extents into boxes, against numpy slicing."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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

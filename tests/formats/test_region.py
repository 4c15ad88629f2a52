"""region: boxes, byte runs and tilings, against numpy and against sets of elements."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats import dtypes, region
from holdfast_formats.errors import StateMismatch
from holdfast_formats.region import Box, Shape
from tests.tiling import tiles

from .strategies import boxes_in, shape_and_box, shape_and_grid, shapes


def elements(box: Box) -> set[Shape]:
    """The model: a box is a set of indices."""
    return set(product(*(range(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))))


def flat(shape: Shape) -> np.ndarray:
    return np.arange(prod(shape), dtype="<u4").reshape(shape)


@given(shape_and_grid())
def test_byte_runs_are_numpy_slices(case: tuple[Shape, list[Box]]) -> None:
    """The runs of every box of a ragged grid, joined, are the bytes that numpy cuts out, and fill the box in order."""
    shape, grid = case
    tensor = flat(shape)
    whole = tensor.tobytes()
    for box in grid:
        runs = list(region.byte_runs(box, shape, 4))
        assert b"".join(whole[start : start + length] for start, _, length in runs) == tensor[box.slices].tobytes()
        assert [at for _, at, _ in runs] == [sum(n for *_, n in runs[:i]) for i in range(len(runs))]


@given(shape_and_box())
def test_byte_runs_are_as_long_as_possible(case: tuple[Shape, Box]) -> None:
    """No two runs touch: there are exactly as many as the box has contiguous pieces."""
    shape, box = case
    taken = np.sort(flat(shape)[box.slices].reshape(-1).astype("<i8"))
    pieces = 0 if not taken.size else 1 + int((np.diff(taken) > 1).sum())
    assert len(list(region.byte_runs(box, shape, 4))) == pieces


@given(shape_and_box())
def test_byte_span_is_the_hull_of_the_runs(case: tuple[Shape, Box]) -> None:
    """The span begins with the first run and ends with the last."""
    shape, box = case
    runs = list(region.byte_runs(box, shape, 2))
    expected = (min(s for s, *_ in runs), max(s + n for s, _, n in runs)) if runs else (0, 0)
    assert region.byte_span(box, shape, 2) == expected


@given(shape_and_box())
def test_the_widest_gap_between_runs(case: tuple[Shape, Box]) -> None:
    """The most bytes from the end of a run to the beginning of the next; none where there is one run or no run."""
    shape, box = case
    runs = list(region.byte_runs(box, shape, 4))
    gaps = [after - (start + length) for (start, _, length), (after, _, _) in pairwise(runs)]
    assert region.widest_gap(box, shape, 4) == max(gaps, default=0)


@given(shape_and_box(), st.data())
def test_the_next_element_inside(case: tuple[Shape, Box], data: st.DataObject) -> None:
    """From any position on, the first element that lies in the box, if there is one."""
    shape, box = case
    at = data.draw(st.integers(0, prod(shape)))
    following = [int(i) for i in np.asarray(flat(shape)[box.slices]).reshape(-1) if i >= at]
    if box.volume:
        assert region.next_inside(box, shape, at) == (following[0] if following else None)


@given(shapes().flatmap(lambda shape: st.lists(boxes_in(shape), max_size=5)))
def test_a_union_counts_each_element_once(boxes: list[Box]) -> None:
    """However boxes overlap, the volume of their union is the number of different elements in them."""
    assert region.union_volume(boxes) == len(set().union(*map(elements, boxes)))


@given(shapes(), st.data())
def test_flat_boxes_cut_a_range_in_order(shape: Shape, data: st.DataObject) -> None:
    """The boxes of a flat range hold exactly its elements, in order, and are few."""
    size = prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = region.flat_boxes(start, stop, shape)
    taken = [int(i) for box in boxes for i in flat(shape)[box.slices].reshape(-1)]
    assert taken == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_flat_boxes_refuse_a_range_outside(start: int, stop: int) -> None:
    """A range that does not lie inside the tensor is refused."""
    with pytest.raises(StateMismatch, match="flat range"):
        region.flat_boxes(start, stop, (2, 3))


@given(shape_and_grid(), st.data())
def test_tiles_agree_with_sets(case: tuple[Shape, list[Box]], data: st.DataObject) -> None:
    """A grid tiles; dropping, doubling or exchanging boxes is seen exactly when the sets of elements show it."""
    shape, grid = case
    assert tiles(grid, shape)
    assert region.first_overlap(grid) is None
    boxes = data.draw(st.lists(st.sampled_from([*grid, data.draw(boxes_in(shape))]), max_size=len(grid) + 1))
    held = [e for box in boxes for e in elements(box)]
    assert tiles(boxes, shape) == (len(held) == len(set(held)) == prod(shape))
    pair = region.first_overlap(boxes)
    assert (pair is not None) == (len(held) != len(set(held)))
    assert pair is None or elements(pair[0]) & elements(pair[1])


def test_tiles_refuse_a_box_outside() -> None:
    """A box that reaches out of the tensor is an error and not just "no tiling"."""
    with pytest.raises(StateMismatch, match="outside shape"):
        tiles([Box((1,), (2,))], (2,))


@given(shapes(), st.data())
def test_intersect_is_the_set_of_common_elements(shape: Shape, data: st.DataObject) -> None:
    """The common part of two boxes has their common elements, and is None when there are none."""
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = region.intersect(a, b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    assert common is None or common.volume == len(elements(common)) > 0


@given(shape_and_box())
def test_within_moves_the_origin(case: tuple[Shape, Box]) -> None:
    """Cutting a box out of a tensor and then all of that box is cutting it once."""
    shape, box = case
    cut = flat(shape)[box.slices]
    assert np.array_equal(cut[box.within(box).slices], cut)
    assert box.within(region.whole(shape)) == box
    assert box.place(box.within(box)) == region.whole(shape).place(box) == box
    assert box.stop == tuple(s.stop for s in box.slices)


@pytest.mark.parametrize(
    ("offset", "shape"),
    [((0,), (1,)), ((0, -1), (1, 1)), ((0, 0), (1, -1)), ((0, 2), (1, 2)), ((0, 0), (1,)), ((0,), (1, 1))],
)
def test_check_box_names_the_tensor(offset: Shape, shape: Shape) -> None:
    """A box of the wrong rank, with negative numbers, or reaching outside is refused by the tensor's name."""
    region.check_box(Box((1, 2), (1, 1)), (2, 3), "w")
    with pytest.raises(StateMismatch, match="'w'"):
        region.check_box(Box(offset, shape), (2, 3), "w")


@given(st.sampled_from(["F4", "F6_E2M3", "F6_E3M2", "BF16", "F32"]), st.data())
def test_byte_box_takes_exactly_the_bytes_of_its_elements(dtype: str, data: st.DataObject) -> None:
    """The bytes of a box hold all bits of its elements and no other bit, or the cut is refused for a reason."""
    width = dtypes.BITS[dtype]
    shape = data.draw(shapes(3, 8).filter(lambda s: prod(s) * width % 8 == 0))
    box = data.draw(st.one_of(boxes_in(shape), st.just(region.whole(shape))))
    view = region.byte_view(dtype, shape, "w")
    try:
        seen = region.byte_box(dtype, box, shape, "w")
    except StateMismatch as error:
        ragged = not shape or shape[-1] * width % 8 != 0
        assert "inside a byte" in str(error)
        assert box.volume, "an empty box cuts nothing"
        assert ragged or box.offset[-1] * width % 8 or box.shape[-1] * width % 8
        return
    region.check_box(seen, view.shape, "w")
    runs = region.byte_runs(seen, view.shape, view.itemsize)
    bits = {bit for start, _, length in runs for bit in range(start * 8, (start + length) * 8)}
    taken = flat(shape)[box.slices].reshape(-1)
    assert bits == {int(i) * width + bit for i in taken for bit in range(width)}


def test_byte_view_refuses_a_tensor_that_ends_inside_a_byte() -> None:
    """Three elements of four bits have no byte view, and the tensor is named."""
    with pytest.raises(StateMismatch, match="'odd'"):
        region.byte_view("F4", (3,), "odd")


def test_grid_strategy_is_not_trivial() -> None:
    """The grids used here are cut in several dimensions: a fixed one covers rows, columns and single elements."""
    boxes = [Box((0, 0), (1, 3)), Box((1, 0), (2, 1)), Box((1, 1), (2, 2))]
    assert [len(list(region.byte_runs(b, (3, 3), 1))) for b in boxes] == [1, 2, 2]
    assert tiles(boxes, (3, 3))
    assert all(region.intersect(a, b) is None for a, b in pairwise(boxes))

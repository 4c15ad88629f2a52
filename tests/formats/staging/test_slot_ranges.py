"""Where in slots the bytes of a part of a file are."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.region import Box
from holdfast_formats.staging.plan import BoxOrigin, PlannedTensor
from holdfast_formats.staging.slot_ranges import SlotRange, slot_ranges
from holdfast_formats.tensors import TensorSpec

HEADER = 4096


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[PlannedTensor, dict[int, Box]]:
    """A tensor of up to three dimensions that ranks hold in slices of one dimension."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    axis = draw(st.integers(0, len(shape) - 1))
    edges = sorted({0, shape[axis], *draw(st.lists(st.integers(0, shape[axis]), max_size=3))})
    boxes = {}
    for rank, (low, high) in enumerate(pairwise(edges)):
        offset, size = [0] * len(shape), list(shape)
        offset[axis], size[axis] = low, high - low
        boxes[rank] = Box(tuple(offset), tuple(size))
    origins = tuple(BoxOrigin(rank, box, 1000 * rank) for rank, box in boxes.items())
    return PlannedTensor(TensorSpec("model", "w", "I32", shape), HEADER, origins, ""), boxes


@given(cut_tensors(), st.integers(0, 900), st.integers(1, 900))
def test_ranges_of_masters_are_those_of_their_weights(
    made: tuple[PlannedTensor, dict[int, Box]], low: int, length: int
) -> None:
    """The same elements, in twice the bytes; and how many bytes of the weight are made of them."""
    tensor, _ = made
    spec = TensorSpec("model", "w", "BF16", tensor.spec.shape)
    copied = tensor._replace(spec=spec)
    rounded = tensor._replace(spec=spec, origins=tuple(one._replace(held_as="F32") for one in tensor.origins))
    plain = slot_ranges([copied], HEADER + low, HEADER + low + length)
    found = slot_ranges([rounded], HEADER + low, HEADER + low + length)
    assert found == [
        SlotRange(rank, base + 2 * (begin - base), base + 2 * (end - base))
        for rank, begin, end in plain
        for base in [1000 * rank]
    ]
    for origin, other in zip(rounded.origins, copied.origins, strict=True):
        assert origin.nbytes(spec) == 2 * other.nbytes(spec) == 4 * origin.box.volume
        assert origin.of_tensor(spec, origin.nbytes(spec)) == other.of_tensor(spec, other.nbytes(spec)) == other.nbytes(spec)


@given(cut_tensors(), st.integers(0, 900), st.integers(1, 900))
def test_the_ranges_are_the_bytes_of_the_part(made: tuple[PlannedTensor, dict[int, Box]], low: int, length: int) -> None:
    """Every element of the part is in a range of the slot of its rank, and every range has such elements at both ends."""
    tensor, boxes = made
    begin, end = HEADER + low, HEADER + low + length
    found = slot_ranges([tensor], begin, end)
    numbers = np.arange(tensor.spec.nbytes // 4).reshape(tensor.spec.shape)
    for rank, box in boxes.items():
        mine = numbers[box.slices].reshape(-1)
        wanted = np.flatnonzero((mine * 4 + 4 > low) & (mine * 4 < low + length))
        ranges = [one for one in found if one.rank == rank]
        if not wanted.size:
            assert not ranges
            continue
        assert ranges == [SlotRange(rank, 1000 * rank + 4 * int(wanted[0]), 1000 * rank + 4 * int(wanted[-1]) + 4)]
        assert wanted.size == wanted[-1] - wanted[0] + 1


def test_neighbours_are_one_range_and_own_ranks_none() -> None:
    """Two tensors that stand next to each other in a slot are asked for at once; what is here is not asked for."""
    spec = TensorSpec("model", "a", "U8", (10,))
    box = Box((0,), (10,))
    tensors = [
        PlannedTensor(spec, HEADER, (BoxOrigin(0, box, 0),), ""),
        PlannedTensor(spec, HEADER + 10, (BoxOrigin(0, box, 10),), ""),
        PlannedTensor(spec, HEADER + 20, (BoxOrigin(1, box, 0),), ""),
    ]
    assert slot_ranges(tensors, 0, HEADER + 100) == [SlotRange(0, 0, 20), SlotRange(1, 0, 10)]
    assert slot_ranges(tensors, HEADER + 5, HEADER + 15, without={1}) == [SlotRange(0, 5, 15)]

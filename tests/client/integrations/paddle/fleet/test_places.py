"""Where parts of a Paddle parameter lie in the whole one: every element of it once, padding never."""

from __future__ import annotations

import pytest
import torch

from holdfast.integrations.paddle.fleet.places import ElementRange, ParameterPlace, TensorCut, slice_of
from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import InvalidRequest

WHOLE = torch.arange(6 * 8, dtype=torch.float32).view(6, 8)


def _written(parts: list[object], shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor that these parts make; an element that none or two of them have fails."""
    found, times = torch.full(shape, -1.0), torch.zeros(shape)
    for part in parts:
        for one in part if isinstance(part, list) else [part]:
            assert isinstance(one, Fragment)
            assert one.shape == shape
            begin = 0
            for box in one.boxes:
                at = tuple(slice(first, first + size) for first, size in zip(box.offset, box.shape, strict=True))
                found[at] = one.tensor.flatten()[begin : begin + box.volume].view(box.shape)
                times[at] += 1
                begin += box.volume
    assert bool((times == 1).all())
    return found


@pytest.mark.parametrize("axis", [0, 1])
def test_the_ranks_of_tensor_parallelism_have_a_box_each(axis: int) -> None:
    parts = [
        ParameterPlace("w", tuple(one.shape), TensorCut(axis, rank, 2)).of(one)
        for rank, one in enumerate(WHOLE.chunk(2, axis))
    ]
    assert torch.equal(_written(parts, (6, 8)), WHOLE)


def test_a_parameter_of_one_rank_is_stored_as_it_is() -> None:
    assert ParameterPlace("w", (6, 8)).of(WHOLE) is WHOLE


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", [None, 0, 1])
def test_sharding_leaves_each_rank_a_range_and_no_padding(ranks: int, cut: int | None) -> None:
    """A buffer in which the parameter begins at 64 and is padded to a multiple of all ranks; its padding is filled with a
    number that must not appear.
    """
    halves = [WHOLE] if cut is None else list(WHOLE.chunk(2, cut))
    parts = []
    for number, local in enumerate(halves):
        place = ParameterPlace("w", tuple(local.shape), None if cut is None else TensorCut(cut, number, 2))
        size, index = local.numel(), 64
        padded = -(-size // (16 * ranks)) * 16 * ranks
        buffer = torch.full((64 + padded + 32,), 999.0)
        buffer[index : index + size] = local.flatten()
        share = len(buffer) // ranks + 1
        for rank in range(ranks):
            begin, end = max(index, rank * share), min(index + padded, (rank + 1) * share)
            span = slice_of(index, size, begin, end)
            kept = buffer[begin:end] if begin < end else torch.zeros(1)  # Paddle's slice of a rank without elements
            parts.append(place.span_of(kept, span))
    assert torch.equal(_written(parts, (6, 8)), WHOLE)


@pytest.mark.parametrize(
    ("begin", "end", "span"),
    [
        (0, 256, (0, 7)),  # all of it, and padding
        (0, 4, (0, 4)),
        (4, 256, (4, 7)),
        (7, 256, (7, 7)),  # padding only
        (64, 128, (7, 7)),
        (512, 256, (7, 7)),  # none: Paddle's end is before its begin
        (0, -64, (0, 0)),
    ],
)
def test_a_parameter_smaller_than_its_padding_is_in_few_ranks(begin: int, end: int, span: tuple[int, int]) -> None:
    assert slice_of(0, 7, begin, end) == ElementRange(*span)


@pytest.mark.parametrize(("tensor", "span"), [((4,), (0, 5)), ((2, 8), (0, 16)), ((64,), (0, 49))])
def test_a_tensor_that_cannot_hold_the_elements_is_refused(tensor: tuple[int, ...], span: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="w: a tensor of shape"):
        ParameterPlace("w", (6, 8)).span_of(torch.zeros(tensor), ElementRange(*span))


def test_a_matrix_that_is_stored_transposed_has_its_part_there() -> None:
    """The tensors are transposed by their owners. Ranges of elements are refused: they are none of the stored matrix."""
    parts = [ParameterPlace("w", (6, 4), TensorCut(1, rank, 2)).transposed() for rank in range(2)]
    assert [(one.local, one.shape, one.offset) for one in parts] == [((4, 6), (8, 6), (0, 0)), ((4, 6), (8, 6), (4, 0))]
    halves = [one.of(WHOLE[:, rank * 4 : rank * 4 + 4].t()) for rank, one in enumerate(parts)]
    assert torch.equal(_written(halves, (8, 6)), WHOLE.t())
    with pytest.raises(InvalidRequest, match="sharding has divided its elements"):
        parts[0].span_of(torch.zeros(4), ElementRange(0, 4))

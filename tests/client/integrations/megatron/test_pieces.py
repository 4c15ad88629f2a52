"""Stretches of a local parameter as parts of stored tensors: the whole of it, and any flat range."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from holdfast.integrations.megatron.pieces import ParameterPiece, empty

GATE = ParameterPiece("fc1", (8, 3), (2, 0), (2, 3), 0)  # rows 2 and 3 of the gate, and of the up below it
UP = ParameterPiece("fc1", (8, 3), (6, 0), (2, 3), 6)
LOCAL = torch.arange(12.0).reshape(4, 3)


def put(whole: torch.Tensor, tensor: torch.Tensor, boxes: tuple, flat: bool) -> None:
    """Write what a Fragment holds to where it says that it lies."""
    rest = tensor.reshape(-1)
    for box in boxes:
        region = whole[box.slices]
        region.copy_(rest[: box.volume].reshape(region.shape) if flat else tensor)
        rest = rest[box.volume :]


def test_a_piece_of_a_whole_parameter_is_its_memory() -> None:
    whole = torch.full((8, 3), -1.0)
    for piece in (GATE, UP):
        fragment = piece.of(LOCAL)
        assert fragment.tensor.untyped_storage().data_ptr() == LOCAL.untyped_storage().data_ptr()
        put(whole, fragment.tensor, fragment.boxes, flat=False)
    assert whole[[2, 3, 6, 7]].equal(LOCAL)
    assert (whole[[0, 1, 4, 5]] == -1).all()


@pytest.mark.parametrize("cuts", [(0, 12), (0, 5, 12), (0, 6, 12), (0, 1, 7, 8, 12)])
def test_ranges_of_a_distributed_optimizer_fill_the_same_places(cuts: tuple[int, ...]) -> None:
    """Each range holds its elements of both halves and nothing else, wherever the cuts are."""
    whole = torch.full((8, 3), -1.0)
    for begin, end in pairwise(cuts):
        shard = LOCAL.flatten()[begin:end].clone()
        parts = [piece.within(shard, begin) for piece in (GATE, UP)]
        assert sum(part.tensor.numel() for part in parts) == end - begin
        for part in parts:
            put(whole, part.tensor, part.boxes, flat=True)
    assert whole[[2, 3, 6, 7]].equal(LOCAL)
    assert (whole[[0, 1, 4, 5]] == -1).all()


def test_no_part_of_a_tensor_keeps_its_shape_and_dtype() -> None:
    part = empty((8, 3), torch.bfloat16)
    assert (part.shape, part.dtype, part.boxes) == ((8, 3), torch.bfloat16, ())

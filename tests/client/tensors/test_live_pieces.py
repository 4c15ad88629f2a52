"""Where live tensors lie in global ones: boxes and views."""

from __future__ import annotations

import itertools

import pytest
import torch

from holdfast.tensors.fragments import Fragment
from holdfast.tensors.live_pieces import pieces, pieces_like
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.region import Box


def test_a_plain_tensor_is_one_whole_box():
    """A plain tensor is whole, detached, and the same memory."""
    parameter = torch.nn.Parameter(torch.arange(6.0).view(2, 3))
    placed = pieces(parameter, "w")
    assert placed.shape == (2, 3) and placed.placement == "replicate" and placed.mesh == {}
    [piece] = placed.pieces
    assert piece.box == Box((0, 0), (2, 3)) and not piece.tensor.requires_grad
    piece.tensor[1, 2] = -1
    assert parameter[1, 2].item() == -1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(4, 6)[1:3, ::2],
        torch.arange(6.0).view(2, 3).t(),
        torch.tensor(5),
        torch.ones(3).expand(1, 3),
        torch.tensor([True, False]),
    ],
    ids=["strided view", "transposed", "0-d", "one row", "bool"],
)
def test_views_and_scalars_are_taken_as_they_are(tensor):
    """No copy is made of what is not contiguous, or has no dimension."""
    [piece] = pieces(tensor, "w").pieces
    assert piece.box.shape == tuple(tensor.shape) == tuple(piece.tensor.shape)
    assert piece.tensor.data_ptr() == tensor.data_ptr() and piece.tensor.stride() == tensor.stride()


def test_elements_that_share_a_place_are_refused():
    """An expanded tensor has no memory of its own for each element: said by name."""
    with pytest.raises(InvalidRequest, match="'w' is expanded or overlaps itself"):
        pieces(torch.ones(3).expand(2, 3), "w")


def test_an_empty_tensor_has_no_pieces():
    """Zero elements are no piece, and the shape is still known."""
    assert pieces(torch.zeros(0, 4), "w")[:2] == ((0, 4), ())


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
def test_float4_boxes_count_elements():
    """Boxes of float4 count the format's elements, twice what torch counts."""
    packed = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    placed = pieces(Fragment(packed[:2], (4, 2), offset=(2, 0)), "w")
    assert placed.shape == (4, 4) and placed.pieces[0].box == Box((2, 0), (2, 4))
    assert placed.pieces[0].tensor.shape == (2, 2)


def test_a_box_fragment_lies_at_its_offset():
    """A declared shard is its box, and its memory is the caller's."""
    local = torch.zeros(2, 3)
    placed = pieces(Fragment(local, (4, 6), offset=(2, 3)), "w")
    assert placed.shape == (4, 6)
    placed.pieces[0].tensor.fill_(1)
    assert placed.pieces[0].box == Box((2, 3), (2, 3)) and local.sum() == 6


def test_a_flat_fragment_is_cut_into_boxes():
    """A flat range becomes boxes whose views follow each other in the local memory."""
    whole = torch.arange(24.0).view(2, 3, 4)
    for start, stop in itertools.combinations(range(25), 2):
        local = whole.view(-1)[start:stop].clone()
        placed = pieces(Fragment(local, (2, 3, 4), flat=(start, stop)), "w")
        assert sum(piece.box.volume for piece in placed.pieces) == stop - start
        assert all(torch.equal(whole[piece.box.slices], piece.tensor) for piece in placed.pieces)
        assert placed.pieces[0].tensor.data_ptr() == local.data_ptr()


def test_state_of_a_fragment_lies_where_the_fragment_lies():
    """Another tensor of the same local shape has the fragment's boxes."""
    fragment = Fragment(torch.zeros(6), (4, 3), flat=(2, 8))
    state = torch.arange(6, dtype=torch.bfloat16)
    placed = pieces_like(fragment, state, "w/exp_avg")
    assert [piece.box for piece in placed.pieces] == list(fragment.boxes)
    assert placed.pieces[0].tensor.data_ptr() == state.data_ptr()

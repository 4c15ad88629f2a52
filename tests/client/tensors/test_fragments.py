"""Where live tensors lie in global ones: boxes, views, and the split rules of torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from holdfast.tensors.fragments import Fragment, Split, _runs_along, pieces, pieces_like, split_runs
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Box
from tests.torchruns import launch


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fragment(torch.zeros(2), (4,)), "either an offset or a flat range"),
        (lambda: Fragment(torch.zeros(2), (4,), offset=(0,), flat=(0, 2)), "either an offset or a flat range"),
        (lambda: Fragment(torch.zeros(2), (4,), offset=(3,)), "outside shape"),
        (lambda: Fragment(torch.zeros(2), (4,), offset=(0, 0)), "outside shape"),
        (lambda: Fragment(torch.zeros(3), (4,), flat=(0, 2)), "contiguous tensor of 2 elements, not one of 3"),
        (lambda: Fragment(torch.zeros(4)[::2], (4,), flat=(0, 2)), "not contiguous"),
        (lambda: Fragment(torch.zeros(2), (4,), flat=(3, 5)), "outside a tensor"),
    ],
)
def test_a_fragment_that_does_not_fit_is_refused(make, message):
    """A shard outside its tensor, or of another size, is refused when it is declared."""
    with pytest.raises((InvalidRequest, StateMismatch), match=message):
        make()


def test_state_of_a_fragment_lies_where_the_fragment_lies():
    """Another tensor of the same local shape has the fragment's boxes."""
    fragment = Fragment(torch.zeros(6), (4, 3), flat=(2, 8))
    state = torch.arange(6, dtype=torch.bfloat16)
    placed = pieces_like(fragment, state, "w/exp_avg")
    assert [piece.box for piece in placed.pieces] == list(fragment.boxes)
    assert placed.pieces[0].tensor.data_ptr() == state.data_ptr()


def indices(runs):
    return [index for start, stop in runs for index in range(start, stop)]


def test_splits_follow_torch():
    """For every small size and mesh, Shard and _StridedShard leave the indices that torch's own split gives."""
    for size, parts, factor in itertools.product(range(13), range(1, 5), (None, 1, 2, 3)):
        placement = Shard(0) if factor is None else _StridedShard(0, split_factor=factor)
        shards, _ = placement._split_tensor(torch.arange(size), parts, with_padding=False)
        for part in range(parts):
            assert indices(split_runs(size, [Split(0, parts, part, factor)])) == shards[part].tolist()


def test_repeated_splits_follow_torch():
    """Two cuts of one dimension, in torch's order, give torch's local length and first index."""
    choices = [Shard(0), _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3), Replicate()]
    for size, mesh, placements in itertools.product((1, 5, 7, 12), ((2, 2), (3, 2)), itertools.product(choices, choices)):
        for coordinate in itertools.product(*map(range, mesh)):
            splits = [
                Split(0, n, c, getattr(p, "split_factor", None))
                for p, n, c in zip(placements, mesh, coordinate, strict=True)
                if not isinstance(p, Replicate)
            ]
            found = indices(split_runs(size, splits))
            shape, offset = _compute_local_shape_and_global_offset((size,), mesh, list(coordinate), placements)
            assert len(found) == shape[0]
            assert not found or found[0] == offset[0]


def test_where_torch_contradicts_itself_the_local_tensor_decides():
    """For uneven shapes FSDP2 cuts in another order than its placements say: the local length tells which it was."""

    def along(size, length, *splits):
        return indices(_runs_along(0, size, (length,), list(splits)))

    cut = Split(0, 3, 2, factor=2)
    assert along(7, 1, cut, Split(0, 2, 0)) == [6]  # as the placements say: the last third of both halves, halved
    assert along(7, 1, cut, Split(0, 2, 1)) == [6]  # as fully_shard does it: the last third of rows 4 to 6
    with pytest.raises(ValueError, match=r"length of 2 in dimension 0 of 7 does not fit"):
        along(7, 2, cut, Split(0, 2, 1))
    with pytest.raises(ValueError, match=r"length of 1 in dimension 0 of 58 fits two layouts"):
        along(58, 1, Split(0, 4, 3, factor=6), Split(0, 6, 3))


def test_boxes_of_dtensors_on_four_ranks():
    """On four real ranks, FSDP2, TP, HSDP, uneven and empty shards: local memory is its box, boxes tile."""
    launch(4, "tests.client.distributed_fragments")

"""The parts of DTensors that ranks hold, against torch's own splits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import _utils
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from holdfast.tensors.live_pieces import Split, _runs_along, split_runs
from tests.torchruns import launch

SPLITS_UNEVEN = hasattr(_utils, "_compute_local_shape_and_global_offset")


def indices(runs):
    return [index for start, stop in runs for index in range(start, stop)]


def test_splits_follow_torch():
    """For every small size and mesh, Shard and _StridedShard leave the indices that torch's own split gives."""
    for size, parts, factor in itertools.product(range(13), range(1, 5), (None, 1, 2, 3)):
        if factor and size % (parts * factor) and not SPLITS_UNEVEN:
            continue
        placement = Shard(0) if factor is None else _StridedShard(0, split_factor=factor)
        shards, _ = placement._split_tensor(torch.arange(size), parts, with_padding=False)
        for part in range(parts):
            assert indices(split_runs(size, [Split(0, parts, part, factor)])) == shards[part].tolist()


@pytest.mark.skipif(not SPLITS_UNEVEN, reason="this torch splits evenly alone, and asks a process group for places")
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
            shape, offset = _utils._compute_local_shape_and_global_offset((size,), mesh, list(coordinate), placements)
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

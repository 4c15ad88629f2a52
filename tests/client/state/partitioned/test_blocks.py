"""Where the parts of blocks are stored, and which blocks of other parts they are."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.state.partitioned.blocks import (
    Blocks,
    parts_of_keys,
    parts_of_wrapper,
    read,
    runs,
    scale_parts,
    size_by_key,
    span_in,
)
from holdfast.tensors.live_pieces import Shards
from holdfast_formats.errors import CorruptManifest
from holdfast_formats.region import Box, whole


def rows(shape: tuple[int, int], *cuts: int) -> tuple[Box, ...]:
    edges = (0, *cuts, shape[0])
    return tuple(Box((a, 0), (b - a, shape[1])) for a, b in pairwise(edges))


def columns(shape: tuple[int, int], *cuts: int) -> tuple[Box, ...]:
    edges = (0, *cuts, shape[1])
    return tuple(Box((0, a), (shape[0], b - a)) for a, b in pairwise(edges))


def blocks(boxes: tuple[Box, ...], size: int, shape: tuple[int, int] = (8, 6)) -> Blocks:
    return Blocks(size, 0, Shards(shape, boxes, None))


def test_rows_of_whole_blocks_are_those_of_the_whole() -> None:
    """Then nothing is said of parts; columns, and rows that end in a block, are described."""
    assert blocks(rows((8, 6), 4), 12).described() == {}
    assert blocks(rows((8, 6), 3), 12).described()["parts"] == [[[0, 0], [3, 6]], [[3, 0], [5, 6]]]
    assert blocks(columns((8, 6), 3), 12).described()["size"] == 12


def order(stored: Blocks) -> torch.Tensor:
    """A number for the block of every element of the whole tensor."""
    found = torch.empty(stored.shards.shape, dtype=torch.long)
    for box, start in zip(stored.shards.boxes, stored.scale_starts, strict=False):
        found[box.slices] = (torch.arange(box.volume) // stored.size + start).view(box.shape)
    return found


ROWS = [(whole((8, 6)),), rows((8, 6), 4), rows((8, 6), 3, 5), rows((8, 6), 2, 4, 6)]
CUTS = st.sampled_from([*ROWS, columns((8, 6), 3), columns((8, 6), 2, 4)])


@given(CUTS, CUTS, st.sampled_from([1, 2, 3, 4, 6, 8, 12, 18, 24]))
def test_runs_are_the_same_blocks(before: tuple[Box, ...], after: tuple[Box, ...], size: int) -> None:
    """Blocks are taken over only if each has the same elements in both; and if parts are rows, then always."""
    stored, scales = blocks(before, size), order(blocks(before, size))
    for box in after:
        mine = scales[box.slices].reshape(-1)
        padded = torch.cat([mine, mine[-1:].expand(-len(mine) % size)]).view(-1, size)
        alike = bool((padded == padded[:, :1]).all())
        alike = alike and all(int((scales == number).sum()) == int((mine == number).sum()) for number in mine.unique())
        found = runs(stored, box, size)
        assert alike or found is None
        assert found is not None or not (alike and before in ROWS and after in ROWS)
        if found is not None:
            local = torch.full((-(-box.volume // size),), -1)
            for part in scale_parts(local, stored.scale_starts[-1], found, "here").parts:
                part.tensor.copy_(torch.arange(part.offset[0], part.offset[0] + len(part.tensor)))
            assert local.tolist() == padded[:, 0].tolist()


def test_other_sizes_are_other_blocks() -> None:
    assert runs(blocks((whole((8, 6)),), 12), whole((8, 6)), 24) is None
    assert runs(blocks((whole((8, 6)),), 12), whole((8, 6)), 12) is not None


def test_where_elements_are_in_a_row() -> None:
    assert span_in(Box((2, 0), (3, 6)), whole((8, 6))) == (12, 30)
    assert span_in(Box((2, 1), (1, 4)), whole((8, 6))) == (13, 17)
    assert span_in(Box((2, 1), (2, 4)), whole((8, 6))) is None


def test_parts_are_found_by_name() -> None:
    assert parts_of_wrapper("m", ["codes", "scale"]).table is None
    assert parts_of_wrapper("m", ["codes", "scale", "qmap"]).all == ("m.codes", "m.scale", "m.qmap")
    assert parts_of_wrapper("m", ["codes", "scale", "zero"]) is None and parts_of_wrapper("m", ["data"]) is None
    keys = dict.fromkeys(["state1", "absmax1", "qmap1", "state2", "step"])
    assert [parts.codes for parts in parts_of_keys(keys)] == ["state1"]
    assert size_by_key(4096, 16) == 256 and size_by_key(4097, 17) == 256 and size_by_key(65536, 32) == 2048
    assert size_by_key(4096, 5) is None


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        {"size": 0, "parts": [[[0, 0], [8, 6]]]},
        {"size": "4", "parts": [[[0, 0], [8, 6]]]},
        {"size": 4, "parts": [[[0, 0], [4, 6]]]},
        {"size": 4, "parts": [[[0, 0], [4, 6]], [[0, 0], [4, 6]]]},
        {"size": 4, "parts": [[[0, 0], [9, 6]]]},
        {"size": 4, "parts": [[[0], [48]]]},
        {"size": 4, "parts": [[0, 0]]},
    ],
)
def test_a_description_that_is_wrong_is_refused(wrong: object) -> None:
    with pytest.raises(CorruptManifest, match="here: the stored description of its blocks"):
        read(wrong, (8, 6), 0, "here")

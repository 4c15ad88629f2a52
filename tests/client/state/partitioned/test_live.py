"""Which tensors of an optimizer's state are blocks; those that could not be put together again are refused by name."""

from __future__ import annotations

import pytest
import torch

from holdfast.state.partitioned.live import blocks_of
from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import InvalidRequest
from tests.client.state.partitioned.test_values import Whole
from tests.low_bit import TABLE, TABLE_4BIT, Coded


class Part:
    """A parameter of which this rank has a part that no mesh describes."""

    def __init__(self) -> None:
        self.value = Fragment(torch.zeros(2, 64), (4, 64), offset=(2, 0))


def test_blocks_of_both_forms() -> None:
    like = torch.zeros(4, 64)
    state = {
        "step": 3,
        "a": Coded.zeros(like, TABLE),
        "b": Coded.zeros(like, TABLE_4BIT),
        "state1": torch.zeros(4, 64, dtype=torch.uint8),
        "absmax1": torch.zeros(1),
        "qmap1": TABLE,
        "state2": torch.zeros(4, 64),
    }
    found = {one.parts.key: one for one in blocks_of(Whole(4, 64), state, "w")}
    assert {key: (one.blocks.size, one.blocks.packed) for key, one in found.items()} == {
        "a": (64, 0),
        "b": (64, 2),
        "state1": (256, 0),
    }
    assert found["a"].described("w/a")["shape"] == [4, 64] and found["state1"].wrapper is None
    assert [key for key, *_ in found["b"].places(torch.zeros(4, 64))] == ["b.codes", "b.scale", "b.qmap"]


@pytest.mark.parametrize("key", ["a", "state1"])
def test_parts_without_a_mesh_are_refused_by_name(key: str) -> None:
    """How other ranks cut the tensor is not known."""
    local = torch.zeros(2, 64)
    keys = {"state1": local.to(torch.uint8), "absmax1": torch.zeros(1), "qmap1": TABLE}
    with pytest.raises(InvalidRequest, match=f"optim: w/{key} .* is sharded: it is not known") as refused:
        blocks_of(Part(), {"a": Coded.zeros(local, TABLE)} if key == "a" else keys, "optim: w")
    assert "save(groups=…)" in refused.value.hint


def test_scales_that_fit_no_block_are_left_to_the_whole() -> None:
    """Of a parameter that is whole, all is stored as it is."""
    odd = {"state1": torch.zeros(4, 64, dtype=torch.uint8), "absmax1": torch.zeros(3), "qmap1": TABLE}
    assert blocks_of(Whole(4, 64), odd, "w") == []

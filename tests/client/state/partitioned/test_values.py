"""Values of blocks, and values as codes: the nearest code, and how far a value moved."""

from __future__ import annotations

import pytest
import torch

from holdfast.state.partitioned import values
from holdfast.state.partitioned.live import LiveBlocks, blocks_of
from holdfast.tensors import wrapped
from holdfast_formats.errors import StateMismatch
from tests.client.tensors.test_wrapped import Blocks as Silent
from tests.low_bit import TABLE, Coded, quantised


class Whole:
    """A parameter that is not sharded."""

    def __init__(self, *shape: int) -> None:
        self.value = torch.zeros(shape)


def by_keys(given: torch.Tensor) -> tuple[dict[str, torch.Tensor], LiveBlocks]:
    codes, scale = quantised(given, TABLE, 256)
    state = {"state1": codes.view(given.shape), "absmax1": scale, "qmap1": TABLE}
    (found,) = blocks_of(Whole(*given.shape), state, "w")
    return state, found


def test_plain_codes_are_the_nearest() -> None:
    """In blocks of which the last is shorter; with a block of zeros."""
    given = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    given[:4] = 0
    expected, _ = by_keys(given)
    state, live = by_keys(torch.zeros_like(given))
    moved = values.put(live, given)
    assert torch.equal(state["state1"][4:], expected["state1"][4:]) and torch.equal(state["absmax1"], expected["absmax1"])
    found = values.of_keys({"codes": state["state1"], "scale": state["absmax1"], "qmap": TABLE}, 256)
    assert 0 < moved <= 1 / 255 * 1.001 and found[:4].abs().max() == 0
    assert float((found - given).abs().max()) <= float(given.abs().max()) / 255 * 1.001


def test_a_wrapper_computes_its_own() -> None:
    given = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    wrapper = Coded.zeros(given, TABLE)
    (live,) = blocks_of(Whole(4, 64), {"m": wrapper}, "w")
    assert values.put(live, given) <= 1 / 255 * 1.001
    assert torch.equal(values.of_wrapper(wrapper, "w/m"), wrapper.dequantize())


def test_a_wrapper_that_cannot_is_refused_by_name() -> None:
    """A class that cannot quantise, or whose context does not say which dtype it shows."""
    silent = Silent.zeros(torch.zeros(2, 8), 8)
    (live,) = blocks_of(Whole(2, 8), {"m": silent}, "w")
    with pytest.raises(StateMismatch, match="m: Blocks cannot quantise values again") as refused:
        values.put(live, torch.zeros(2, 8))
    assert "restore(groups=…)" in refused.value.hint
    assert values.appearance(Silent, wrapped.describe(silent, "w/m"), "w/m") is torch.float32
    with pytest.raises(StateMismatch, match="does not say which dtype"):
        values.appearance(Silent, {**wrapped.describe(silent, "w/m"), "context": None}, "w/m")

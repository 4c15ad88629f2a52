"""The parts of a torchtitan model, without torchtitan: what their modules keep besides tensors is stored with them."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.integrations.torchtitan_state import ModelParts
from holdfast_formats.errors import InvalidRequest
from tests.client.checkpoint_in_memory import restore, save


class Scaled(nn.Linear):
    """A layer with a value of its own, as Transformer Engine's FP8 scales are one."""

    def __init__(self, value: Any) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def made(tensor: Any, data: Any, stream: Any, values: Any) -> list[nn.Module]:
    """Two parts of a pipeline, as torchtitan names their layers."""
    first = nn.ModuleDict({"layers": nn.ModuleDict({"0": Scaled(tensor), "1": Scaled(data)})})
    return [first, nn.ModuleDict({"layers": nn.ModuleDict({"2": Scaled(stream), "3": Scaled(values)})})]


def test_extra_state_of_every_kind_is_restored() -> None:
    """A tensor, bytes, a stream and plain values, each by the module's own name, whichever part has it."""
    given = made(torch.tensor([1.5, float("nan")]), b"\x80\x00", io.BytesIO(b"scales"), {"calls": 3})
    checkpoint = save({"model": ModelParts(given).entry()})
    assert "layers.0._extra_state" in checkpoint.stored().values["model"]
    live = made(torch.zeros(2), b"", io.BytesIO(), {"calls": 0})
    restore(checkpoint, {"model": ModelParts(live).entry()})
    found = [layer.value for part in live for layer in part["layers"].values()]
    assert found[0].view(torch.int32).tolist() == given[0]["layers"]["0"].value.view(torch.int32).tolist()
    assert (found[1], found[2].getvalue(), found[3]) == (b"\x80\x00", b"scales", {"calls": 3})
    weights = [[tensor for part in one for tensor in part.parameters()] for one in (given, live)]
    assert all(map(torch.equal, *weights))


def test_two_parts_with_one_name() -> None:
    """One of them would be lost."""
    with pytest.raises(InvalidRequest, match=r"two parts of the model have different tensors named 'weight'"):
        ModelParts([nn.Linear(2, 2), nn.Linear(2, 2)])


def test_a_mapping_stands_for_parts_of_parameters_alone() -> None:
    """A save compares it with the last one; a module with more is walked through again."""
    assert ModelParts([nn.Linear(2, 2)]).entry().keys() == {"weight", "bias"}
    assert isinstance(ModelParts([nn.BatchNorm1d(2)]).entry(), ModelParts)
    assert isinstance(ModelParts([Scaled(1)]).entry(), ModelParts)

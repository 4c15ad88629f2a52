"""An entry of the state brings along the layout and the files of its Checkpointer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpointer, Named, ParallelLayout
from holdfast.layout.model_form import ModelForm
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.daemons import RunningDaemon

SIZE = 3


def layout(statements: str) -> ParallelLayout:
    return ParallelLayout(
        "", program=f"name = 'ours'\nfrom = 'hf'\nto = 'ours'\nstatements = '''\n{statements}\n* -> *\n'''"
    )


class Turned:
    """A model with a square weight that another system holds transposed, with its optimizer after a step."""

    def __init__(self, seed: int, statements: str = "weight^T -> weight") -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(SIZE, SIZE)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(2, SIZE)).sum().backward()
        self.optimizer.step()
        self.form = ModelForm(lambda: layout(statements), lambda: {"config.json": {"a": 1}, "other.json": 2}, self.parts)

    def parts(self) -> list[tuple[str, dict[str, Any]]]:
        return [("", vars(self.model))]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": Named(self.model, form=self.form), "optim": self.optimizer}


def test_it_is_used_where_no_layout_is_given(daemon: RunningDaemon) -> None:
    one, other = Turned(1), Turned(2)
    with Checkpointer("form", one.state, at=daemon.socket, assets={"config.json": {"a": 2}}) as checkpointer:
        checkpointer.save(1, wait="durable")
        assert json.loads(checkpointer.read_asset(1, "config.json")) == {"a": 2}
        assert json.loads(checkpointer.read_asset(1, "other.json")) == 2
    with Checkpointer("form", other.state, at=daemon.socket) as checkpointer:
        checkpointer.restore()
    assert torch.equal(one.model.weight, other.model.weight)
    plain = nn.Linear(SIZE, SIZE)
    with Checkpointer("form", {"model": plain}, at=daemon.socket) as checkpointer:
        checkpointer.restore(groups=("model",))
    assert torch.equal(one.model.weight, plain.weight.T)


@pytest.mark.parametrize("group", ["model", "optim"])
def test_a_program_that_no_longer_transposes_a_tensor_is_refused(daemon: RunningDaemon, group: str) -> None:
    """Before anything changes."""
    one, other = Turned(1), Turned(2, "")
    with Checkpointer(f"changed-{group}", one.state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
    before = other.model.weight.detach().clone()
    with (
        Checkpointer(f"changed-{group}", other.state, at=daemon.socket) as checkpointer,
        pytest.raises(StateMismatch, match="was saved transposed") as refused,
    ):
        checkpointer.restore(groups=(group,))
    assert "weight" in refused.value.members["tensor"] and torch.equal(other.model.weight, before)


def test_a_layout_without_a_program_is_refused() -> None:
    for given in ("dp=1", ParallelLayout("dp=1", program="auto")):
        with pytest.raises(InvalidRequest, match="names no mapping program"):
            Checkpointer("form", Turned(1).state, layout=given)


def test_only_the_model_goes_through_a_program() -> None:
    with pytest.raises(InvalidRequest, match="the entry 'net' is a model with a mapping program"):
        Checkpointer("form", {"net": Turned(1).state["model"]})

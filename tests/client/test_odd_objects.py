"""What else users put into a state: objects of torch, numpy and Python come back, or the refusal says what to write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast_formats.errors import InvalidRequest
from tests.client.checkpoint_in_memory import restore, save


def schedule(module: nn.Module) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(module.parameters(), lr=0.1), 1)


class Holding:
    """An object that is asked for its state, and has what it is given."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


@pytest.mark.parametrize(
    ("state", "place", "line"),
    [
        ({"nets": {"actor": nn.Linear(1, 1)}}, "nets.actor", 'state["nets_actor"] = state["nets"]["actor"]'),
        ({"nets": [nn.Linear(1, 1)]}, "nets[0]", 'state["nets_0"] = state["nets"][0]'),
        ({"plans": [schedule(nn.Linear(1, 1))]}, "plans[0]", 'state["plans_0"] = state["plans"][0]'),
        ({"a": {"b": ({"c": torch.amp.GradScaler("cpu")},)}}, "a.b[0].c", 'state["a_b_0_c"] = state["a"]["b"][0]["c"]'),
        ({"o": {"n": 1, "sgd": torch.optim.SGD([torch.zeros(1)])}}, "o.sgd", 'state["o_sgd"] = state["o"]["sgd"]'),
        (
            {"loader": torch.utils.data.DataLoader([1, 2])},
            "loader",
            "torchdata.stateful_dataloader import StatefulDataLoader",
        ),
        (
            {"data": {"train": torch.utils.data.DataLoader([1])}},
            "data.train",
            'state["data"] = {"epoch": epoch, "batch": batch}',
        ),
        ({"g": torch.Generator()}, "g", 'state["g"] = generator.get_state()'),
        ({"loader": Holding({"s": schedule(nn.Linear(1, 1))})}, "loader.s", 'state_dict()["s"].state_dict()'),
    ],
)
def test_a_refusal_says_which_line_to_write(state, place, line):
    """The place of the object, and the line that makes it part of the checkpoint."""
    with pytest.raises(InvalidRequest) as refusal:
        save(state)
    assert refusal.value.detail.startswith(f"{place}: ")
    assert line in refusal.value.hint


def test_the_line_that_a_refusal_gives_works():
    """An entry of its own: the module, the schedule and the generator come back then."""

    def make(seed: int) -> dict:
        torch.manual_seed(seed)
        nets = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
        state: dict = {f"nets_{name}": net for name, net in nets.items()}
        plan = schedule(nets["actor"])
        plan.last_epoch = seed
        return state | {"plans_0": plan, "g": torch.Generator().manual_seed(seed).get_state()}

    live = make(2)
    restore(save(make(1)), live)
    again = make(1)
    assert all(torch.equal(live[key].weight, again[key].weight) for key in ("nets_actor", "nets_critic"))
    assert live["plans_0"].last_epoch == 1 and torch.equal(live["g"], again["g"])


def test_gradients_come_back_between_the_steps_of_accumulation():
    """`.grad` is no part of the state; handed over as tensors, as the README says, training goes on to the bit."""

    def make(seed: int) -> dict:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        grads = {name: p.grad for name, p in model.named_parameters()}
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1), "grads": grads}

    def accumulate(state: dict, seed: int) -> None:
        batch = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed))
        state["model"](batch).square().sum().backward()

    def step(state: dict) -> None:
        state["optim"].step()
        state["optim"].zero_grad(set_to_none=False)

    one, other = make(1), make(2)
    accumulate(one, 0)
    step(one)
    accumulate(one, 1)
    restore(save(one), other)
    for state in (one, other):
        accumulate(state, 2)
        step(state)
        accumulate(state, 3)
    for name, parameter in one["model"].named_parameters():
        twin = other["model"].get_parameter(name)
        assert torch.equal(parameter, twin) and torch.equal(parameter.grad, twin.grad) and twin.grad is other["grads"][name]

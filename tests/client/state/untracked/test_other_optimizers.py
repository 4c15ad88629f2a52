"""An optimizer that trains the state's parameters and is not in the state is named by each save."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast import Checkpointer
from holdfast.left_out import LeftOutNote, LeftOutWarning
from holdfast.state.train_state import TrainState
from holdfast.state.untracked.other_optimizers import OtherOptimizers


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def noted(state: TrainState) -> list[str]:
    return [note for note in state.snapshot().notes if isinstance(note, LeftOutNote) and "steps model" in note]


def heard(**entries: Any) -> TrainState:
    return TrainState(entries, 0, 1)


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.optimizer = inner

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


class Trainer:
    """An object of the user's own, which saves its optimizers by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)


class StatefulLoader(DataLoader[int]):
    """As torchdata has it."""

    def state_dict(self) -> Any:
        return {"position": 0}

    def load_state_dict(self, state: Any) -> None: ...


def test_an_optimizer_that_was_constructed_again_is_named() -> None:
    model = network()
    state = heard(model=model, optim=torch.optim.AdamW(model.parameters()))
    assert noted(state) == []
    again = torch.optim.AdamW(model.parameters())
    assert noted(state) == [], "it has not stepped"
    stepped(again)
    assert [note.partition(", because")[0] for note in noted(state)] == [
        "not saved: what the AdamW that steps model.0.bias and 3 more keeps"
    ]
    del again
    gc.collect()
    assert noted(state) == []


def test_a_second_optimizer_is_named_with_its_parameter() -> None:
    model = network()
    state = heard(model=model, optim=torch.optim.SGD(model[0].parameters(), momentum=0.9))
    stepped(state.state["optim"])
    second = stepped(torch.optim.Adagrad([model[1].bias]))
    assert [note.partition(" keeps")[0] for note in noted(state)] == ["not saved: what the Adagrad that steps model.1.bias"]
    del second


def test_nothing_is_named_without_need() -> None:
    model, other = network(), network()
    own = torch.optim.AdamW(model.parameters())
    state = heard(model=model, optim=own)
    kept = [
        stepped(torch.optim.AdamW(other.parameters())),
        stepped(torch.optim.SGD(model.parameters(), lr=0.1)),
        stepped(own),
    ]
    assert noted(state) == [], "of parameters outside the state, and one without a state"
    weights = heard(model=model)
    kept.append(stepped(torch.optim.AdamW(model.parameters())))
    assert noted(weights) == [], "a state without an optimizer is saved on purpose"


@pytest.mark.parametrize(
    "entries",
    [
        lambda inner: {"optim": Lookahead(inner)},
        lambda inner: {"optims": [torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), inner]},
        lambda inner: {"optim": torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "trainer": Trainer(inner)},
    ],
    ids=["wrapper", "list", "object"],
)
def test_one_inside_of_an_entry_is_not_named(entries: Callable[[torch.optim.Optimizer], dict[str, Any]]) -> None:
    model = network()
    inner = torch.optim.AdamW(model.parameters())
    given = entries(inner)
    others = OtherOptimizers({"model": model, **given})
    stepped(inner)
    assert list(others.notes()) == []


class Slow(torch.optim.lr_scheduler.StepLR):
    """A scheduler of the user's own class, which holds an optimizer, and saves none."""


@pytest.mark.parametrize("made", [lambda own: Slow(own, 2), lambda own: StatefulLoader([1])], ids=["scheduler", "loader"])
def test_schedulers_and_loaders_of_the_users_own_hold_none(made: Callable[[torch.optim.Optimizer], Any]) -> None:
    model = network()
    own = torch.optim.AdamW(model.parameters())
    others = OtherOptimizers({"model": model, "optim": own, "more": made(own)})
    again = stepped(torch.optim.AdamW(model.parameters()))
    assert len(list(others.notes())) == 1
    del again


def test_the_hook_keeps_no_state_alive() -> None:
    model = network()
    state = heard(model=model, optim=torch.optim.AdamW(model.parameters()))
    there = weakref.ref(state.unsaved.others)
    del state
    gc.collect()
    assert there() is None


def test_a_save_warns_of_it(tmp_path: Path) -> None:
    model = network()
    with Checkpointer("run", {"model": model, "optim": torch.optim.AdamW(model.parameters())}, at=tmp_path) as checkpointer:
        again = stepped(torch.optim.AdamW(model.parameters()))
        with pytest.warns(LeftOutWarning, match="what the AdamW that steps model.0.bias and 3 more keeps"):
            checkpointer.save(1, wait="durable")
        stepped(again)

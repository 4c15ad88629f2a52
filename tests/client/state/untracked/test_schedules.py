"""A scheduler that is not in the state is named by each save."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, SequentialLR

from holdfast.left_out import LeftOutNote
from holdfast.state.train_state import TrainState
from tests.client import frameworks


class Wrapped:
    """An object around a scheduler, which passes its state on, as frameworks have it."""

    def __init__(self, scheduler: Any) -> None:
        self.inner = scheduler

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def steady(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 1.0)


def left_out(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    steady(optimizer)
    return {}


GIVEN: dict[str, tuple[Callable[[torch.optim.Optimizer], dict[str, Any]], bool]] = {
    "nothing": (lambda optimizer: {}, False),
    "left out": (left_out, True),
    "left out beside others": (
        lambda optimizer: {**left_out(optimizer), "scaler": torch.amp.GradScaler("cpu"), "n": 1},
        True,
    ),
    "saved": (lambda optimizer: {"scheduler": steady(optimizer)}, False),
    "saved by another name": (lambda optimizer: {"plan": Wrapped(steady(optimizer))}, False),
    "a sequence": (lambda optimizer: {"plan": SequentialLR(optimizer, [steady(optimizer)] * 2, [2])}, False),
    "of plateaus": (lambda optimizer: {"plan": ReduceLROnPlateau(optimizer)}, False),
}


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, frameworks.Accelerated])
@pytest.mark.parametrize("kind", GIVEN)
def test_a_scheduler_that_is_not_in_the_state_is_named(kind: str, wrap: Callable[[Any], Any]) -> None:
    """By the optimizer's key, with the line to write; none is named where there is none, or where it is saved."""
    make, named = GIVEN[kind]
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, **make(optimizer), "optim": wrap(optimizer)}
    notes = TrainState(state, 0, 1).snapshot().notes
    assert [isinstance(note, LeftOutNote) and "the learning-rate scheduler of optim" in note for note in notes] == [
        True
    ] * named

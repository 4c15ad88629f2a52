"""Numbers in attributes of optimizers and their wrappers come back if they change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.state.train_state import TrainState
from holdfast_formats.errors import CorruptManifest
from tests.client import frameworks
from tests.client.checkpoint_in_memory import Checkpoint, restore


class Counting(torch.optim.SGD):
    """Counts in itself, which its state_dict() does not have."""

    seen = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given, lr=0.1)
        self.seen = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        self.seen += 1


MAKES = {
    "lookahead": lambda module: frameworks.CountingLookahead(torch.optim.AdamW(module.parameters(), lr=0.01)),
    "lookahead of two": lambda module: [
        frameworks.CountingLookahead(torch.optim.SGD([p], lr=0.01)) for p in module.parameters()
    ],
    "in itself": lambda module: Counting(module.parameters()),
    "lookahead of one that counts": lambda module: frameworks.CountingLookahead(Counting(module.parameters())),
}


class Training:
    """A state that was made before its first step, as that of a Checkpointer is."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 2)
        self.optim = MAKES[kind](self.model)
        self.state = TrainState({"model": self.model, "optim": self.optim}, 0, 1)

    def step(self, at: int) -> None:
        self.model.zero_grad()
        self.model(torch.rand(4, 3, generator=torch.Generator().manual_seed(at))).square().sum().backward()
        for optimizer in self.optim if isinstance(self.optim, list) else [self.optim]:
            optimizer.step()
        self.model.zero_grad()  # else they would be named: no hooks tell this state of steps

    def restore(self, checkpoint: Checkpoint) -> list[str]:
        restoration = self.state.prepare(checkpoint.stored())
        checkpoint.fill(restoration)
        restoration.apply()
        return restoration.notes


@pytest.mark.parametrize("kind", MAKES)
def test_a_training_goes_on_with_the_numbers_of_the_save(kind: str) -> None:
    """In the middle of a cycle; and the restored one is saved with them at once."""
    whole, resumed, once_more = (Training(kind, seed) for seed in (1, 2, 3))
    for at in range(3):
        whole.step(at)
    checkpoint = Checkpoint(whole.state.snapshot())
    assert not resumed.restore(checkpoint)
    assert not once_more.restore(Checkpoint(resumed.state.snapshot()))
    for at in range(3, 6):
        for training in (whole, resumed, once_more):
            training.step(at)
    for training in (resumed, once_more):
        assert torch.equal(training.model.weight, whole.model.weight)
        assert numbers(training.optim) == numbers(whole.optim)


def numbers(optim: Any) -> list[Any]:
    found = []
    for one in optim if isinstance(optim, list) else [optim, *filter(None, [getattr(optim, "inner", None)])]:
        found += [(k, float(v)) for k, v in vars(one).items() if isinstance(v, int | float | torch.Tensor)]
    return found


def test_options_stay_those_of_the_user() -> None:
    """What did not change is not saved: a wrapper that is made with another option keeps that."""
    whole, resumed = Training("lookahead", 1), Training("lookahead", 2)
    whole.step(0)
    resumed.optim.every = 7
    resumed.restore(Checkpoint(whole.state.snapshot()))
    assert (resumed.optim.every, resumed.optim.count, resumed.optim.rate, resumed.optim.warm) == (7, 1, 0.5, True)
    assert set(Training("lookahead", 1).state.snapshot().values["extra"]) == {"rng"}


def test_what_has_no_place_is_noted() -> None:
    """And an optimizer without any such number, or a text that is none, is as strict as all else."""
    whole, resumed = Training("lookahead of one that counts", 1), Training("lookahead", 2)
    whole.step(0)
    checkpoint = Checkpoint(whole.state.snapshot())
    assert "optim has no Counting.seen, which the checkpoint has: not restored" in resumed.restore(checkpoint)
    stored = checkpoint.stored()
    stored.values["extra"]["optim/numbers"] = "[]"  # type: ignore[index]
    with pytest.raises(CorruptManifest, match="optim/numbers"):
        resumed.state.prepare(stored)


def test_numbers_go_with_their_optimizer_by_its_key() -> None:
    """As an entry of the group `extra` that `exclude` covers by the optimizer's key."""
    whole = Training("lookahead", 1)
    whole.step(0)
    assert "optim/numbers" in whole.state.snapshot().values["extra"]
    assert "optim/numbers" not in whole.state.snapshot(exclude=("extra/optim",)).values["extra"]


def test_another_wrapper_has_its_own_first_look() -> None:
    """A wrapper that takes another one's place in the state has changed nothing yet."""
    whole = Training("lookahead", 1)
    whole.step(0)
    other = frameworks.CountingLookahead(whole.optim.inner)
    state: dict[str, Any] = {"model": whole.model, "optim": whole.optim}
    kept = TrainState(state, 0, 1)
    kept.snapshot()
    state["optim"] = other
    assert "optim/numbers" not in kept.snapshot().values["extra"]
    other.count += 1
    assert "optim/numbers" in kept.snapshot().values["extra"]
    restore(Checkpoint(kept.snapshot()), {"model": whole.model, "optim": whole.optim})
    assert whole.optim.count == other.count

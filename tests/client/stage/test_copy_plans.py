"""Samples of a save's tensors are read while the daemon leases a slot: what changes after that fails the save."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from holdfast.stage.background_copy import BackgroundCopy
from holdfast.stage.background_safe import Judge
from holdfast.stage.copy_plans import CopyPlan, CopyPlans
from holdfast.stage.staging import NOTHING, SlotLayout, lay_out
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import CheckpointError, TornSnapshot


class Place(NamedTuple):
    """A slot of two, as `CopyPlans` sees it."""

    slots: Any
    index: int
    data: memoryview


class Slots:
    """Two slots in this process."""

    def __init__(self) -> None:
        self.places = [Place(self, index, memoryview(bytearray(2**20))) for index in range(2)]

    def emptied(self, index: int) -> int:
        return 0


class Training:
    """A model with a weight that is stored transposed, and the slots of its saves."""

    def __init__(self) -> None:
        self.model = nn.Module()
        self.model.fc = nn.Parameter(torch.randn(200, 96).t())
        self.model.bias = nn.Parameter(torch.randn(3000))
        self.model.still = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        trained = [self.model.fc, self.model.bias]
        self.state = {"model": self.model, "optim": torch.optim.SGD(trained, lr=0.1)}
        self.seen, self.plans, self.slots = TrainState(self.state, 0, 1), CopyPlans(), Slots()
        self.layout = NOTHING

    def laid_out(self) -> SlotLayout:
        self.layout = lay_out(self.seen.snapshot(), {}, Judge(self.state, fenced=False), self.layout)
        return self.layout

    def into(self, slot: int) -> CopyPlan:
        return self.plans.into(self.slots.places[slot], self.layout)  # type: ignore[arg-type]

    def copied(self, plan: CopyPlan) -> CheckpointError | None:
        errors: list[CheckpointError | None] = []
        plan.copy_at_once()
        copy = BackgroundCopy(plan.tracks, errors.append, late=True, samples=plan.samples)
        copy.start()
        copy.join()
        return errors[0]

    def is_in(self, slot: int) -> bool:
        data = self.slots.places[slot].data
        return all(
            bytes(data[one.slot_offset : one.slot_offset + one.tensor.nbytes]) == one.tensor.contiguous().numpy().tobytes()
            for one in self.layout.copies
            if one.tensor.dtype is torch.float32
        )


def add(tensor: torch.Tensor) -> None:
    """Change all of it, as a program does that torch does not see."""
    tensor.detach().numpy()[...] += 1


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("name", ["fc", "bias"])
def test_a_change_between_the_samples_and_the_copy_fails_the_save(name: str, slot: int) -> None:
    """Also in a slot that no save has been copied into: the samples are those of the sources alone."""
    training = Training()
    training.laid_out()
    assert training.copied(training.into(0)) is None and training.is_in(0)
    training.plans.sample(training.laid_out())
    add(training.model.get_parameter(name))
    plan = training.into(slot)
    assert plan.samples is not None
    error = training.copied(plan)
    assert isinstance(error, TornSnapshot) and name in error.detail
    training.plans.sample(training.laid_out())
    assert training.copied(training.into(slot)) is None and training.is_in(slot)


def test_samples_serve_the_layout_that_they_were_read_for_once() -> None:
    training = Training()
    training.plans.sample(training.laid_out())
    assert training.into(0).samples is None  # no slot had these tensors
    training.plans.sample(training.laid_out())
    assert training.into(0).samples is not None and training.into(0).samples is None
    training.plans.sample(training.layout)
    training.model.bias = nn.Parameter(torch.randn(3000))
    training.state["optim"].param_groups[0]["params"][1] = training.model.bias
    training.laid_out()
    assert training.into(0).samples is None
    assert training.copied(training.into(0)) is None and training.is_in(0)


def test_a_save_with_samples_copies_what_was_there_all_the_time() -> None:
    training = Training()
    for number in range(6):
        training.plans.sample(training.laid_out())
        assert training.copied(training.into(number % 2)) is None and training.is_in(number % 2)
        add(training.model.fc)
        add(training.model.bias)
        if number == 3:
            add(training.model.still)

"""Hyper-parameters on a restore: a note says which the checkpoint replaces, and `keep=` leaves some as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast.left_out import LeftOutNote
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import InvalidRequest
from tests.client.checkpoint_in_memory import Checkpoint, restore, save

Made = dict[str, Any]


def made(lr: float, scheduled: bool = False, steps: int = 0, **more: Any) -> Made:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **more)
    state: Made = {"model": model, "optim": optimizer}
    if scheduled:
        state["scheduler"] = lr_scheduler.OneCycleLR(optimizer, max_lr=lr * 10, total_steps=20)
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if scheduled:
            state["scheduler"].step()
    return state


def test_a_note_names_what_was_given_and_is_replaced() -> None:
    """Another learning rate and weight decay: both, with both values, and the line that keeps them."""
    twin = made(0.5, weight_decay=0.3)
    notes = restore(save(made(0.1, steps=2)), twin).notes
    assert len(notes) == 1
    assert isinstance(notes[0], LeftOutNote)
    for text in ("lr 0.5 by 0.1 of optim.param_groups[0]", "weight_decay 0.3 by 0.01", "keep=('optim/lr',)"):
        assert text in notes[0]
    assert twin["optim"].param_groups[0]["lr"] == 0.1


def test_what_is_kept_stays_and_is_no_news() -> None:
    """The moments come back all the same."""
    twin = made(0.5, weight_decay=0.3)
    assert restore(save(made(0.1, steps=2)), twin, keep=("optim/lr", "optim/weight_*")).notes == []
    group = twin["optim"].param_groups[0]
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.3)
    assert len(twin["optim"].state) == 2


def test_what_a_schedule_moves_is_no_news() -> None:
    """Learning rate and betas are others than at the start; what they began with is what counts."""
    checkpoint = save(made(0.1, scheduled=True, steps=5))
    assert restore(checkpoint, made(0.1, scheduled=True)).notes == []
    (note,) = restore(checkpoint, made(0.2, scheduled=True)).notes
    assert "lr " in note
    assert "betas" not in note


def by_hand(state: Made, steps: int) -> None:
    """Train with a schedule that the loop writes itself."""
    for step in range(steps):
        state["optim"].param_groups[0]["lr"] = 0.1 / (2 + step)
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optim"].step()
        state["optim"].zero_grad()


def test_what_a_loop_sets_at_each_step_is_no_news() -> None:
    """The next step sets it again, so nothing that the user gave is lost. Another beginning is news, and once."""
    state = made(0.1)
    seen = TrainState(state, 0, 1)  # as a Checkpointer does, before the training
    by_hand(state, 5)
    checkpoint, twin = Checkpoint(seen.snapshot()), made(0.1)
    assert restore(checkpoint, twin).notes == []
    assert twin["optim"].param_groups[0]["lr"] == 0.1 / 6
    changed = made(0.4)
    seen = TrainState(changed, 0, 1)
    restoration = seen.prepare(checkpoint.stored())
    checkpoint.fill(restoration)
    restoration.apply()
    (note,) = restoration.notes
    assert "lr 0.4 by 0.1 of optim.param_groups[0]" in note
    by_hand(changed, 1)
    assert restore(Checkpoint(seen.snapshot()), made(0.4)).notes == []


def test_a_rate_that_no_loop_has_set_is_compared_as_it_is() -> None:
    """What was restored and trained on is what another launch would lose by giving the first rate once more."""
    state = made(0.1, steps=1)
    checkpoint = Checkpoint(TrainState(state, 0, 1).snapshot())
    (note,) = restore(checkpoint, made(0.2)).notes
    assert "lr 0.2 by 0.1" in note


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    """It is spelled wrongly, and the rate would be replaced in silence."""
    with pytest.raises(InvalidRequest, match="optim/learning_rate") as told:
        restore(save(made(0.1)), made(0.1), keep=("optim/learning_rate",))
    assert "optim/lr" in told.value.hint

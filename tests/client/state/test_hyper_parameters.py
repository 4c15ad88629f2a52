"""Hyper-parameters on a restore: a note says which the checkpoint replaces, and `keep=` leaves some as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from holdfast.left_out import LeftOutNote
from holdfast.state.hyper_parameters import settings
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import InvalidRequest, StateMismatch
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


def test_hyper_parameters_that_only_one_side_has_are_named() -> None:
    """One of Paddle's, which torch would not read, and those of another kind of optimizer."""
    state, twin = made(0.1), made(0.1)
    state["optim"].param_groups[0]["l1_decay"] = 0.25
    (note,) = restore(save(state), twin).notes
    assert "l1_decay 0.25 has no effect in optim.param_groups[0]" in note
    state["optim"] = torch.optim.SGD(state["model"].parameters(), 0.1, weight_decay=0.01)
    checkpoint = save(state)
    (note,) = restore(checkpoint, made(0.1)).notes
    assert "betas (0.9, 0.999) stays, as the checkpoint has none in optim.param_groups[0]; eps 1e-08 stays" in note
    assert restore(checkpoint, made(0.1), keep=("optim/betas", "optim/eps")).notes == []


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


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler]] = {
    "T_max": lambda optimizer, total: lr_scheduler.CosineAnnealingLR(optimizer, T_max=total),
    "total_steps": lambda optimizer, total: lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=total),
    "total_size": lambda optimizer, total: lr_scheduler.CyclicLR(optimizer, 0.1, 1.0, total // 2, cycle_momentum=False),
    "1.total_iters": lambda optimizer, total: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.PolynomialLR(optimizer, total_iters=total)],
        milestones=[2],
    ),
    "patience": lambda optimizer, total: lr_scheduler.ReduceLROnPlateau(optimizer, patience=total),
}


def scheduled(setting: str, total: int, steps: int = 0) -> Made:
    state = made(0.1)
    scheduler = SCHEDULES[setting](state["optim"], total)
    for _ in range(steps):
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optim"].step()
        scheduler.step(*([1.0] if setting == "patience" else []))  # type: ignore[arg-type]
    return {**state, "scheduler": scheduler}


def value_of(state: Made, setting: str) -> Any:
    scheduler = state["scheduler"]
    return {one.name: one.value for one in settings(scheduler, scheduler.state_dict())}[setting]


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of SequentialLR in older versions of torch
@pytest.mark.parametrize("setting", SCHEDULES)
def test_a_longer_schedule_is_replaced_with_a_note_or_kept(setting: str) -> None:
    """A schedule for more steps than the checkpoint's: named with the line that keeps it, and kept by that line."""
    checkpoint = save(scheduled(setting, 10, steps=5))
    assert restore(checkpoint, scheduled(setting, 10)).notes == []
    twin = scheduled(setting, 20)
    given = value_of(twin, setting)
    (note,) = restore(checkpoint, twin).notes
    assert isinstance(note, LeftOutNote)
    assert f"{setting} {given} by {value_of(twin, setting)} of scheduler (keep=('scheduler/{setting}',)" in note
    longer = scheduled(setting, 20)
    assert restore(checkpoint, longer, keep=(f"scheduler/{setting}",)).notes == []
    assert value_of(longer, setting) == given
    assert longer["scheduler"].last_epoch == 5


def test_a_kept_one_cycle_goes_on_to_its_new_end() -> None:
    """Its phases are computed from the number of steps, and are kept with it."""
    twin = scheduled("total_steps", 20)
    restore(save(scheduled("total_steps", 10, steps=5)), twin, keep=("scheduler/*",))
    whole = scheduled("total_steps", 20, steps=19)
    for _ in range(14):
        twin["optim"].step()
        twin["scheduler"].step()
    assert twin["scheduler"].get_last_lr() == whole["scheduler"].get_last_lr()


def test_a_schedules_peak_is_named() -> None:
    """OneCycleLR keeps its `max_lr` in the groups of the optimizer."""
    checkpoint = save(scheduled("total_steps", 10, steps=5))
    twin = made(0.1)
    twin["scheduler"] = lr_scheduler.OneCycleLR(twin["optim"], max_lr=3.0, total_steps=10)
    (note,) = restore(checkpoint, twin).notes
    assert "max_lr 3.0 by 1.0" in note


def test_a_setting_that_no_scheduler_has_is_refused() -> None:
    twin = scheduled("T_max", 20)
    with pytest.raises(InvalidRequest, match="scheduler/T_min") as refused:
        restore(save(scheduled("T_max", 10)), twin, keep=("scheduler/T_min",))
    assert "scheduler/T_max" in refused.value.hint


class Numbered(lr_scheduler.LRScheduler):
    """A user's scheduler with a `state_dict` of its own form."""

    def get_lr(self) -> list[float]:
        return [0.1]

    def state_dict(self) -> dict[Any, Any]:
        return {0: self.last_epoch, "_schedulers": 3}

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self.last_epoch = state_dict[0]


def test_a_state_dict_of_another_form_has_no_settings() -> None:
    """And is given back as it was."""
    state, twin = made(0.1), made(0.1)
    state["scheduler"], twin["scheduler"] = Numbered(state["optim"]), Numbered(twin["optim"])
    state["scheduler"].last_epoch = 7
    assert restore(save(state), twin, keep=("optim/lr",)).notes == []
    assert twin["scheduler"].last_epoch == 7


def test_the_state_of_another_programs_scheduler_is_refused() -> None:
    """As DeepSpeed's, which torch's would put beside its own and begin at its start."""
    state, twin = made(0.1), made(0.1)
    state["scheduler"] = {"last_batch_iteration": 4}
    twin["scheduler"] = lr_scheduler.StepLR(twin["optim"], 3)
    saved = save(state)
    with pytest.raises(StateMismatch, match="last_batch_iteration, and StepLR") as refused:
        restore(saved, twin)
    assert "exclude=('extra/scheduler',)" in refused.value.hint
    assert twin["scheduler"].last_epoch == 0

"""Copies of frozen tensors: the slot always has the tensors' bytes, and an optimizer's step need not wait for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast import Checkpointer, SaveWarning
from holdfast.memory import native_copy
from holdfast.stage.background_copy import BackgroundCopy
from holdfast.stage.background_safe import Judge
from holdfast.stage.copy_plans import CopyPlans
from holdfast.stage.staging import NOTHING, lay_out
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import CheckpointError, TornSnapshot
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon

daemon = own_daemon(listen="none")

KIB = 2**8  # elements
CHANGES = ("nothing", "torch", "data", "numpy", "swapped", "longer", "emptied", "other", "trained", "frozen")


def changed(model: nn.Module, slot: bytearray, how: str, at: int) -> None:
    """Change a tensor in some way, or what is in the slot."""
    parameter = model.base[at % 3]
    row = at % len(parameter)
    with torch.no_grad():
        if how == "torch":
            parameter[row] += 1
        elif how == "data":
            parameter.data[row] += 1
        elif how == "numpy":
            parameter.detach().numpy()[row] += 1
        elif how == "swapped":
            parameter.data = parameter.data + (at % 2)
        elif how == "longer":
            model.base.append(nn.Parameter(torch.randn(1 + at % 7), requires_grad=False))
    if how == "emptied":
        slot[:] = bytes(len(slot))
    elif how == "other":
        slot[at % len(slot)] ^= 1
    elif how in ("trained", "frozen"):
        parameter.requires_grad_(how == "trained")


SAVE = st.tuples(st.integers(0, 1), st.sampled_from(CHANGES), st.integers(0, 2**20), st.booleans())


@pytest.mark.parametrize("library", [True, False])
@given(st.lists(SAVE, min_size=4, max_size=10))
def test_a_slot_has_the_bytes_of_the_tensors(library: bool, saves: list[tuple[int, str, int, bool]]) -> None:
    """Whatever changed between two saves, and however; in whichever slot; however often it was the same before. A
    comparison after the step refuses what it cannot tell from a change after the save, once.
    """
    model = nn.Module()
    model.base = nn.ParameterList([torch.randn(2100), torch.randn(70 * KIB), torch.randn(96, 40).T])
    model.requires_grad_(False)
    model.head = nn.Linear(40, 40)
    state = {"model": model, "optim": torch.optim.SGD(model.head.parameters(), lr=0.1)}
    train, layout, homes, plans = TrainState(state, 0, 1), NOTHING, [object(), object()], [CopyPlans(), CopyPlans()]
    slots, torn = [bytearray(2**20), bytearray(2**20)], [0, 0]
    with pytest.MonkeyPatch.context() as patch:
        if not library:
            patch.setattr(native_copy, "_library", None)
        for which, how, at, late in (*saves, *((0, "nothing", 0, True),) * 3):
            changed(model, slots[which], how, at)
            layout = lay_out(train.snapshot(), {}, Judge(state, fenced=False), layout)
            plan = plans[which].onto(homes[which], memoryview(slots[which]), layout.copies)
            plan.copy_at_once()
            errors: list[CheckpointError | None] = []
            copy = BackgroundCopy(plan.tracks, errors.append, late=late)
            copy.fence_step(train.gradients.as_noted)
            copy.start()
            copy.join()
            if late and isinstance(errors[0], TornSnapshot):
                torn[which] += 1
                continue
            assert errors == [None]
            for one in layout.copies:
                size = one.tensor.numel() * one.tensor.element_size()
                live = one.tensor.contiguous().view(-1).view(torch.uint8).numpy()
                assert np.array_equal(np.frombuffer(slots[which], np.uint8)[one.slot_offset : one.slot_offset + size], live)
    unseen = any(how in ("data", "numpy", "other", "emptied") for _, how, _, _ in saves)
    assert max(torn) <= unseen


class Adapted(nn.Module):
    """A frozen base of 24 MiB, and an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(6)).requires_grad_(False)
        self.adapter = nn.Linear(128, 128, bias=False)


def adapted(**more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Adapted()
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1), **more}
    step(state)
    return state


def step(state: dict[str, Any]) -> None:
    for parameter in state["model"].parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    state["optim"].step()


class Held:
    """Copies of frozen tensors wait here for `release`."""

    def __init__(self) -> None:
        self.met, self.released = threading.Event(), threading.Event()


@contextmanager
def held() -> Iterator[Held]:
    real, real_look, hold = native_copy.Noted.copy, native_copy.Noted.differing, Held()

    def differing(noted: native_copy.Noted) -> Any:
        hold.met.set()
        assert hold.released.wait(60)
        return real_look(noted)

    def copy(noted: native_copy.Noted, renew: bool = False) -> native_copy.CopyOutcome:
        if renew:
            hold.met.set()
            assert hold.released.wait(60)
        return real(noted, renew)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_copy.Noted, "copy", copy)
        patch.setattr(native_copy.Noted, "differing", differing)
        try:
            yield hold
        finally:
            hold.released.set()


def waits(hold: Held, act: Any) -> bool:
    """Whether `act` returns only once the copies of frozen tensors may go on."""
    thread = threading.Thread(target=act)
    thread.start()
    assert hold.met.wait(60)
    thread.join(0.3)
    waiting = thread.is_alive()
    hold.released.set()
    thread.join()
    return waiting


def settled(checkpointer: Checkpointer, saves: int = 3) -> None:
    """Save often enough that all of the base was found in the slot."""
    for number in range(1, saves + 1):
        checkpointer.save(number, wait="durable")


def test_a_step_does_not_wait_for_what_is_frozen(daemon: RunningDaemon, run: str) -> None:
    """The save is sealed after the comparison, and has the state of its call: the base, and the adapter before the step."""
    state = adapted()
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        settled(checkpointer)
        before = {name: value.clone() for name, value in state["model"].state_dict().items()}
        with held() as hold:
            ticket = checkpointer.save(9)
            step(state)
            assert hold.met.wait(60) and not ticket.staged
        ticket.result(60)
        step(state)
        with torch.no_grad():
            state["model"].base[0].weight.zero_()
        assert checkpointer.restore() == 9
    assert all(torch.equal(value, before[name]) for name, value in state["model"].state_dict().items())


@pytest.mark.parametrize("saves", [0, 1])
def test_the_first_saves_are_waited_for(daemon: RunningDaemon, run: str, saves: int) -> None:
    """As long as it is not known whether the bytes stay."""
    state = adapted()
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        settled(checkpointer, saves)
        with held() as hold:
            checkpointer.save(9)
            assert waits(hold, lambda: step(state))


@pytest.mark.parametrize("act", [Checkpointer.fence, lambda checkpointer: checkpointer.save(10)])
def test_a_fence_and_the_next_save_wait_for_everything(daemon: RunningDaemon, run: str, act: Any) -> None:
    """After `fence()` any tensor may be changed."""
    state = adapted()
    with Checkpointer(run, state, at=daemon.socket, fenced=True) as checkpointer:
        settled(checkpointer)
        with held() as hold:
            ticket = checkpointer.save(9)
            step(state)
            assert waits(hold, lambda: act(checkpointer))
        ticket.result(60)


def test_unfreezing_waits_before_the_next_step(daemon: RunningDaemon, run: str) -> None:
    """A base that is trained from now on is changed by the step: it must be copied before."""
    state = adapted()
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        settled(checkpointer)
        before = state["model"].base[3].weight.clone()
        with held() as hold:
            ticket = checkpointer.save(9)
            state["model"].base[3].requires_grad_(True)
            assert waits(hold, lambda: step(state))
        ticket.result(60)
        assert not torch.equal(state["model"].base[3].weight, before)
        checkpointer.save(10, wait="durable")
        checkpointer.restore(9, groups=("model",))
        assert torch.equal(state["model"].base[3].weight, before)


def bypassing(weight: torch.Tensor) -> None:
    weight.data.add_(1)


def counted(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight[5, 7] += 1


@pytest.mark.parametrize("change", [bypassing, counted])
@pytest.mark.parametrize("saves", [1, 3])
def test_a_change_between_saves_is_saved(daemon: RunningDaemon, run: str, change: Any, saves: int) -> None:
    """Of a base that stayed before, too."""
    state = adapted()
    weight = state["model"].base[2].weight
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        settled(checkpointer, saves)
        change(weight)
        expected = weight.clone()
        ticket = checkpointer.save(9)
        step(state)
        ticket.result(60)
        weight.data.zero_()
        checkpointer.restore(9)
        assert torch.equal(weight, expected)


def test_a_change_that_nothing_shows_is_saved_or_refused(daemon: RunningDaemon, run: str) -> None:
    """One element of a base that stayed before is written past torch: it cannot be told from a change after the save. If
    the save is waited for, nothing could change after it.
    """
    state = adapted()
    weight = state["model"].base[2].weight
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        settled(checkpointer)
        weight.data[5, 7] += 1
        checkpointer.save(8, wait="durable")
        checkpointer.save(9, wait="durable")
        weight.data[900, 8] += 1
        expected = weight.clone()
        ticket = checkpointer.save(10)
        step(state)
        try:
            ticket.result(60)
        except TornSnapshot as error:
            assert "model/base.2.weight" in error.detail
            with pytest.warns(SaveWarning, match="torn-snapshot"):
                checkpointer.save(10, wait="durable")
        weight.data.zero_()
        checkpointer.restore(10)
        assert torch.equal(weight, expected)


def test_what_a_restore_brings_is_saved(daemon: RunningDaemon, run: str) -> None:
    """It writes past torch: the save after it compares everything before the step."""
    state = adapted()
    weight = state["model"].base[2].weight
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        settled(checkpointer)
        with torch.no_grad():
            weight[3, 3] += 1
        for number in range(4, 7):
            checkpointer.save(number, wait="durable")
        checkpointer.restore(3)
        expected = weight.clone()
        ticket = checkpointer.save(7, existing="same")
        step(state)
        ticket.result(60)
        weight.data.zero_()
        checkpointer.restore(7)
        assert torch.equal(weight, expected)


@pytest.mark.parametrize("change", [bypassing, counted])
def test_a_change_under_the_comparison_fails_the_save_once(daemon: RunningDaemon, run: str, change: Any) -> None:
    """It is named. From then on steps wait for all of the copy, as that state does not stay as it is."""
    state = adapted()
    weight = state["model"].base[5].weight
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        settled(checkpointer)
        with held() as hold:
            ticket = checkpointer.save(9)
            step(state)
            assert hold.met.wait(60)
            change(weight)
        with pytest.raises(TornSnapshot, match=r"model/base\.5\.weight"):
            ticket.result(60)
        with pytest.warns(SaveWarning, match="torn-snapshot"):
            checkpointer.save(10, wait="durable")
        for number in range(11, 14):
            checkpointer.save(number, wait="durable")
        with held() as hold:
            checkpointer.save(20)
            assert waits(hold, lambda: step(state))


def test_an_average_that_is_updated_after_a_step_is_waited_for(daemon: RunningDaemon, run: str) -> None:
    """An update that comes less often than saves rounds the average of the frozen base, too."""
    state = adapted()
    state["ema"] = AveragedModel(state["model"], avg_fn=lambda average, value, _: average * 0.9 + value * 0.1)
    state["ema"].update_parameters(state["model"])
    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        settled(checkpointer)
        with held() as hold:
            ticket = checkpointer.save(9)
            step(state)
            state["ema"].update_parameters(state["model"])
            assert hold.met.wait(60)
        ticket.result(60)


def test_a_copy_of_a_model_that_follows_it_is_waited_for(daemon: RunningDaemon, run: str) -> None:
    """A target network without gradients, also a part of it that is written with its own bytes."""
    state = adapted(target=Adapted().requires_grad_(False))

    def follow() -> None:
        with torch.no_grad():
            for mine, its in zip(state["target"].parameters(), state["model"].parameters(), strict=True):
                mine.lerp_(its, 0.5)

    with Checkpointer(run, state, at=daemon.socket) as checkpointer:
        follow()
        for number in range(1, 15):
            ticket = checkpointer.save(number)
            step(state)
            follow()
            ticket.result(60)

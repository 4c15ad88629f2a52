"""What a save leaves out although training changes it is named then, and again when it is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import CorruptManifest, InvalidRequest
from tests.client import frameworks
from tests.client.checkpoint_in_memory import Checkpoint
from tests.daemons import RunningDaemon
from tests.kit.daemons import own_daemon


def counted(model: frameworks.Unlisted) -> None:
    model.n += 1


def replaced(model: frameworks.Unlisted) -> None:
    model.table = torch.ones(3)


def written(model: frameworks.Unlisted) -> None:
    model.table += 1


CHANGES: dict[str, tuple[Callable[[frameworks.Unlisted], None], str, str]] = {
    "number": (counted, "plain attributes that have changed: model.0.n", "model.0.n (was 1, is 0)"),
    "buffer, replaced": (replaced, "have changed: model.0.table", "not persistent: model.0.table"),
    "buffer, in place": (written, "have changed: model.0.table", "not persistent: model.0.table"),
}


@pytest.mark.parametrize("saves", [0, 3])
@pytest.mark.parametrize("kind", CHANGES)
def test_what_changed_and_is_not_saved_is_named_twice(kind: str, saves: int) -> None:
    """By each save after it, the first one too, and by the restore. Without a change there is nothing to tell."""
    change, at_save, at_restore = CHANGES[kind]
    model, other = nn.Sequential(frameworks.Unlisted()), nn.Sequential(frameworks.Unlisted())
    state, live = TrainState({"model": model}, 0, 1), TrainState({"model": other}, 0, 1)
    for _ in range(saves):
        taken = state.snapshot()
        assert not taken.notes and set(taken.values["extra"]) == {"rng"}
    change(model[0])  # type: ignore[arg-type]
    for _ in range(2):
        taken = state.snapshot()
        (note,) = taken.notes
        assert note.startswith("not saved: ") and at_save in note
    restored = live.prepare(Checkpoint(taken).stored())
    assert [at_restore in note for note in restored.notes] == [True]
    if kind == "number":  # the user has set it
        other[0].n = 1  # type: ignore[assignment]
        assert not live.prepare(Checkpoint(taken).stored()).notes


class Adapting(torch.optim.SGD):
    """Keeps more than its state_dict() has."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.phase, self.history, self.norms, self.count = "warm", [0.5], torch.zeros(3), 0
        self.parameters, self.late = [p for group in self.param_groups for p in group["params"]], None


ADAPTING: dict[str, Callable[[Adapting], object]] = {
    "phase": lambda optimizer: setattr(optimizer, "phase", "main"),
    "history": lambda optimizer: optimizer.history.append(0.25),
    "norms": lambda optimizer: optimizer.norms.add_(1),
    "late": lambda optimizer: setattr(optimizer, "late", 3),
}


@pytest.mark.parametrize("kind", ADAPTING)
def test_what_an_optimizer_keeps_besides_is_named_twice(kind: str) -> None:
    """What is no number: numbers are saved. Its list of the parameters has not changed."""
    made = [Adapting(nn.Linear(1, 1).parameters()) for _ in range(2)]
    modules = [nn.Linear(1, 1) for _ in range(2)]
    for optimizer, module in zip(made, modules, strict=True):
        optimizer.param_groups[0]["params"] = optimizer.parameters = list(module.parameters())
    state, live = [TrainState({"model": m, "optim": o}, 0, 1) for m, o in zip(modules, made, strict=True)]
    modules[0].weight.detach().add_(1)
    made[0].count = 3
    assert not state.snapshot().notes
    ADAPTING[kind](made[0])
    taken = state.snapshot()
    assert [f"optim.Adapting.{kind}" in note for note in taken.notes] == [True]
    notes = live.prepare(Checkpoint(taken).stored()).notes
    assert [f"not restored: plain attributes, which were not saved: optim.Adapting.{kind}" in note for note in notes] == [
        True
    ]


class Framed(frameworks.Accelerated):
    """With the objects that frameworks keep in their wrappers, and what a user's wrapper may have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.gradient_state, self.history = frameworks.Counter(), [0.5]


def test_of_wrappers_objects_are_the_framework_s() -> None:
    """Lists and mappings are named as those of optimizers."""
    model = nn.Linear(1, 1)
    wrapper = Framed(torch.optim.SGD(model.parameters(), lr=0.1))
    state = TrainState({"model": model, "optim": wrapper}, 0, 1)
    wrapper.gradient_state.n += 1
    assert not state.snapshot().notes
    wrapper.history.append(0.25)
    assert [": optim.Framed.history;" in note for note in state.snapshot().notes] == [True]


def test_what_the_state_has_by_another_name_is_not_named() -> None:
    """A tensor under a key of its own, a module or an optimizer in an attribute: they are saved."""
    model = frameworks.Unlisted()
    hidden, total = model.hidden[0], {"total": model.total}
    state = TrainState({"model": model, "hidden": hidden, "optim": model.inner, "more": total}, 0, 1)
    hidden.weight.detach().add_(1)
    model.inner.state[hidden.weight].update(momentum_buffer=torch.ones(1, 2))
    model.total.add_(1)
    assert not state.snapshot().notes


class Asked(nn.Linear):
    """Counts how often its parameters are asked for."""

    times = 0

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        type(self).times += 1
        return super().parameters(recurse)


def test_a_save_without_a_walk_does_not_look_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tensor in an attribute too, whether or not it changes."""
    monkeypatch.setattr(Asked, "times", 0)
    model = nn.Sequential(frameworks.Unlisted(), Asked(1, 1))
    state = TrainState({"model": model}, 0, 1)
    state.snapshot()
    first = Asked.times
    assert not state.snapshot().notes
    model[0].total += 1  # type: ignore[operator]
    assert "model.0.total" in state.snapshot().notes[0]
    assert Asked.times == first


def test_a_value_of_the_state_that_is_replaced_at_each_save_is_not_named() -> None:
    """Values are read again without a walk, and the attribute that has the new tensor is saved with it."""
    model = frameworks.Unlisted()
    live: dict[str, Any] = {"model": model, "more": {"n": 0}}
    state = TrainState(live, 0, 1)
    for n in range(3):
        model.total = model.total + 1
        live["more"] = {"total": model.total, "n": n}
        assert not state.snapshot().notes
    live["more"] = {"n": 1}
    model.total = model.total + 1
    assert "model.total" in state.snapshot().notes[0]


def test_a_module_that_is_moved_has_not_changed() -> None:
    """To another device. Anything else that takes a buffer's place counts."""
    model = nn.Sequential(frameworks.Unlisted())
    state = TrainState({"model": nn.Sequential(nn.Linear(1, 1)), "other": model}, 0, 1)
    state.snapshot()
    model[0]._buffers["table"] = torch.zeros(3, device="meta")
    assert not state.snapshot().notes
    model[0]._buffers["table"] = torch.zeros(4)
    assert "other.0.table" in state.snapshot().notes[0]


def test_the_key_is_reserved_and_its_value_checked() -> None:
    """`unsaved` is no key of a state, and what no save has written under it is refused."""
    with pytest.raises(InvalidRequest, match="'unsaved' is reserved"):
        TrainState({"unsaved": 1}, 0, 1)
    state = TrainState({"model": nn.Linear(1, 1)}, 0, 1)
    stored = Checkpoint(state.snapshot()).stored()
    stored.values["extra"]["unsaved"] = "3"  # type: ignore[index]
    with pytest.raises(CorruptManifest, match="unsaved"):
        state.prepare(stored)
    assert not state.prepare(stored, ignore=("extra/unsaved",)).notes


daemon = own_daemon(listen="none")


class Training:
    """Two optimizers, as those of a generator and its critic."""

    def __init__(self, daemon: RunningDaemon, run: str, **more: Any) -> None:
        self.models = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(1, 1)})
        self.optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in self.models.items()}
        self.state = {"model": self.models, "optim": self.optimizers, **more}
        self.checkpointer = Checkpointer(run, self.state, at=daemon.socket)
        self.steps = 0

    def backward(self) -> None:
        self.models["b"](self.models["a"](torch.ones(1, 2))).square().sum().backward()

    def step(self, *names: str) -> None:
        for name in names or ("a", "b"):
            self.optimizers[name].step()

    def saved(self) -> bool:
        """Whether a save names gradients."""
        self.steps += 1
        ticket = self.checkpointer.save(self.steps, wait="durable")
        return any("gradients" in note for note in ticket.notes)


def test_gradients_between_steps_are_named(daemon: RunningDaemon) -> None:
    """In the middle of an accumulation, before the first step too; not once they are used, dropped, or set to zero."""
    training = Training(daemon, "gradients")
    assert not training.saved()
    training.backward()
    assert training.saved()
    training.step()
    assert not training.saved()  # used, and still there
    training.backward()
    assert training.saved()
    training.step()
    for to_none in (False, True):
        training.models.zero_grad(set_to_none=to_none)
        assert not training.saved()
        training.backward()
        assert training.saved()
        training.step()
    training.backward()
    training.step("b")
    assert not training.saved()  # what another optimizer's step leaves behind is set to zero before it is used
    training.models.zero_grad()
    training.backward()
    assert training.saved()
    assert training.checkpointer.restore() == training.steps
    report = training.checkpointer.last_restore
    assert report is not None and any("not restored: gradients" in note for note in report.notes)
    assert not training.saved()  # these belong to what was before the restore
    training.checkpointer.close()


def test_gradients_in_the_state_are_saved(daemon: RunningDaemon) -> None:
    """As the documentation has it: nothing is left out then."""
    training = Training(daemon, "gradients-saved")
    for parameter in training.models.parameters():
        parameter.grad = torch.zeros_like(parameter)
    training.state["grads"] = {name: p.grad for name, p in training.models.named_parameters()}
    training.backward()
    assert not training.saved()
    training.checkpointer.close()

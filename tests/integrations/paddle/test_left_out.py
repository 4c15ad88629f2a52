"""What a save of a Paddle training would leave out is stored, refused or named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.optimizer import lr

from holdfast.integrations import paddle as holdfast_paddle
from holdfast.integrations.paddle.documents import Scheduler
from holdfast.tensors import json_values
from holdfast_formats.errors import InvalidRequest

pytestmark = pytest.mark.filterwarnings("ignore:::paddle")
paddle.set_device("cpu")


class Counting(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", paddle.zeros([1]), persistable=False)
        self.register_buffer("table", paddle.ones([70_000]), persistable=False)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x)


def backward(model: Any) -> None:
    (model(paddle.ones([2, 3])) ** 2).mean().backward()


def notes_of(act: Callable[[], object]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return "\n".join(str(one.message) for one in caught)


@pytest.mark.parametrize("outputs", [3, 6000])  # a weight whose contents are compared, and one that is too long
@pytest.mark.parametrize("set_to_zero", [True, False])
def test_gradients_between_steps_are_named(tmp_path: Path, set_to_zero: bool, outputs: int) -> None:
    """Not those that the last step has used, and not cleared ones."""
    model = nn.Linear(3, outputs)
    optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path) as attached:
        backward(model)
        optimizer.step()
        assert "gradients" not in notes_of(lambda: attached.save(1, wait="durable"))
        optimizer.clear_grad(set_to_zero)
        assert "gradients" not in notes_of(lambda: attached.save(2, wait="durable"))
        backward(model)
        assert "gradients that were accumulated" in notes_of(lambda: attached.save(3, wait="durable"))
        assert "gradients that were accumulated" in notes_of(attached.restore)


def test_changed_buffers_that_are_not_persistable_are_named(tmp_path: Path) -> None:
    model = Counting()
    with holdfast_paddle.attach(model, None, "run", at=tmp_path) as attached:
        assert "buffers" not in notes_of(lambda: attached.save(1, wait="durable"))
        backward(model)
        notes = notes_of(lambda: attached.save(2, wait="durable"))
    assert "model.calls" in notes and "model.table" not in notes


class Patient(lr.LRScheduler):
    """Halves the rate when a loss has not fallen, and remembers the best one."""

    def __init__(self) -> None:
        self.best, self.waited = float("inf"), 0
        super().__init__(0.1)

    def seen(self, loss: float) -> None:
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)

    def get_lr(self) -> float:
        return float(self.base_lr / 2**self.waited)


class Thorough(Patient):
    def state_keys(self) -> None:
        self.keys = ["last_epoch", "last_lr", "best", "waited"]


@pytest.mark.parametrize("kind", [Patient, Thorough])
@pytest.mark.parametrize("inner", [False, True])
def test_what_a_schedulers_state_lacks_is_named(tmp_path: Path, kind: type[Patient], inner: bool) -> None:
    """Also of the one that a warm-up goes over to; not before it changes, and not what state_keys() lists."""
    model, own = nn.Linear(3, 3), kind()
    scheduler = lr.LinearWarmup(own, 3, 0.0, 0.1) if inner else own
    optimizer = paddle.optimizer.SGD(scheduler, parameters=model.parameters())
    with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path) as attached:
        assert "attributes" not in notes_of(lambda: attached.save(1, wait="durable"))
        own.seen(2.0)
        own.seen(3.0)
        notes = notes_of(lambda: attached.save(2, wait="durable"))
    assert ("attributes of scheduler that have changed: best, waited; list them" in notes) == (kind is Patient)


@pytest.mark.parametrize(
    "made",
    [
        lambda: lr.NoamDecay(64, 10),
        lambda: lr.PiecewiseDecay([2, 4], [0.1, 0.2, 0.3]),
        lambda: lr.NaturalExpDecay(0.1, 0.5),
        lambda: lr.InverseTimeDecay(0.1, 0.5),
        lambda: lr.PolynomialDecay(0.1, 5, cycle=True),
        lambda: lr.LinearWarmup(lr.CosineAnnealingWarmRestarts(0.1, 3), 3, 0.0, 0.1),
        lambda: lr.LinearWarmup(0.1, 3, 0.0, 0.1),
        lambda: lr.ExponentialDecay(0.1, 0.9),
        lambda: lr.MultiStepDecay(0.1, [2, 4]),
        lambda: lr.StepDecay(0.1, 2),
        lambda: lr.LambdaDecay(0.1, lambda epoch: 0.9**epoch),
        lambda: lr.ReduceOnPlateau(0.1, patience=1),
        lambda: lr.CosineAnnealingDecay(0.1, 5),
        lambda: lr.MultiplicativeDecay(0.1, lambda epoch: 0.9),
        lambda: lr.OneCycleLR(0.1, 20),
        lambda: lr.CyclicLR(0.1, 0.5, 3),
        lambda: lr.LinearLR(0.1, 5),
        lambda: lr.CosineAnnealingWarmRestarts(0.1, 3),
    ],
)
def test_paddles_own_schedulers_lose_nothing(made: Callable[[], Any]) -> None:
    """Nothing is named, and another one that gets the state goes on with the same rates."""
    scheduler, other = made(), made()
    entry = Scheduler(scheduler)

    def step(one: Any) -> float:
        one.step(*([1.0] if isinstance(one, lr.ReduceOnPlateau) else []))
        return float(one())

    for count in range(12):
        assert entry.left_out("scheduler") is None
        if count == 4:
            Scheduler(other).load_state_dict(json_values.loads(json_values.dumps(entry.state_dict(), "s"), "s"))
        rate = step(scheduler)
        assert count < 4 or step(other) == rate


def test_the_mode_of_a_layer_that_has_changed_is_named(tmp_path: Path) -> None:
    """As torch's: one that is frozen by eval() in the training. Not one that was so from the first step on, and not all of
    them during a validation.
    """
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.1)))
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    model[2].eval()
    with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path) as attached:
        backward(model)
        optimizer.step()
        optimizer.clear_grad()
        assert "mode" not in notes_of(lambda: attached.save(1, wait="durable"))
        model.eval()
        assert "mode" not in notes_of(lambda: attached.save(2, wait="durable"))
        model.train()
        model[2].eval()
        model[1].eval()
        assert "submodules, which has changed: model.1;" in notes_of(lambda: attached.save(3, wait="durable"))
        assert "the mode of submodules, as it was when saved: model.1 (eval)" in notes_of(attached.restore)


def test_every_optimizer_brings_its_scheduler() -> None:
    """Beside another one that is given, too."""
    model, own, other = nn.Linear(3, 3), lr.StepDecay(0.1, 2), lr.StepDecay(0.1, 3)
    one = paddle.optimizer.SGD(own, parameters=[model.weight])
    two = paddle.optimizer.SGD(other, parameters=[model.bias])
    state = holdfast_paddle.state(model, one, second=two)
    assert state["scheduler"].scheduler is own and state["second_scheduler"].scheduler is other
    state = holdfast_paddle.state(model, one, other)
    assert state["scheduler"].scheduler is other and state["optimizer_scheduler"].scheduler is own
    assert len(holdfast_paddle.state(model, one, own)) == 4


def test_an_average_of_paddle_is_refused_with_what_to_use() -> None:
    model = nn.Linear(3, 3)
    inner = paddle.optimizer.AdamW(parameters=model.parameters())
    average = paddle.incubate.ModelAverage(0.15, parameters=model.parameters())
    with pytest.raises(InvalidRequest, match="ModelAverage") as refused:
        holdfast_paddle.state(model, inner, average=average)
    assert "ema=" in refused.value.hint


def test_static_programs_are_refused_before_paddle_crashes() -> None:
    model = nn.Linear(3, 3)
    paddle.enable_static()
    try:
        with pytest.raises(InvalidRequest, match="static programs"):
            holdfast_paddle.state(model)
    finally:
        paddle.disable_static()

"""An optimizer and a scaler of Paddle that train what is in a state, and are not in it, are named by each save."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn

from holdfast import LeftOutWarning
from holdfast.integrations import paddle as holdfast_paddle
from holdfast.left_out import LeftOutNote
from holdfast.state.train_state import TrainState
from tests.integrations.paddle.train import scaler_of

pytestmark = pytest.mark.filterwarnings("ignore:::paddle")
paddle.set_device("cpu")


def network() -> Any:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def adam(parameters: Any, **options: Any) -> Any:
    return paddle.optimizer.AdamW(0.01, parameters=list(parameters), **options)


def loss_of(model: Any) -> Any:
    return (model(paddle.ones([2, 3])) ** 2).mean()


def stepped(model: Any, optimizer: Any) -> Any:
    loss_of(model).backward()
    optimizer.step()
    optimizer.clear_grad()
    return optimizer


def heard(model: Any, optimizer: Any, **more: Any) -> TrainState:
    return TrainState(holdfast_paddle.state(model, optimizer, **more), 0, 1)


def noted(state: TrainState) -> list[str]:
    notes = [note for note in state.snapshot().notes if isinstance(note, LeftOutNote)]
    return [note.partition(" keeps")[0].removeprefix("not saved: what the ") for note in notes if "that steps" in note]


@pytest.mark.parametrize("half", [False, True])
def test_an_optimizer_that_was_constructed_again_is_named(half: bool) -> None:
    """As soon as it has stepped, and as long as it lives; its masters count too."""
    model = network()
    if half:
        model = paddle.amp.decorate(model, level="O2", dtype="bfloat16", master_weight=True)
    state = heard(model, adam(model.parameters(), multi_precision=True))
    again = adam(model.parameters(), multi_precision=True)
    assert noted(state) == []
    for parameter in model.parameters():
        parameter.grad = paddle.ones_like(parameter)
    again.step()
    assert noted(state) == ["AdamW that steps 0.bias and 3 more"]
    del again
    gc.collect()
    assert noted(state) == []


@pytest.mark.parametrize("way", ["step", "minimize", "groups"])
def test_a_second_optimizer_is_named_with_its_parameter(way: str) -> None:
    """Also one that existed before the state, by whichever method it steps."""
    model = network()
    given = model[1].parameters()[1:]
    second = adam([{"params": given}] if way == "groups" else given)
    state = heard(model, adam(model[0].parameters()))
    stepped(model, paddle.optimizer.Momentum(0.01, parameters=model[0].parameters()))  # collected
    gc.collect()
    if way == "minimize":
        loss = loss_of(model)
        loss.backward()
        second.minimize(loss)
    else:
        stepped(model, second)
    assert noted(state) == ["AdamW that steps 1.bias"]


def test_nothing_is_named_without_need() -> None:
    model, other = network(), network()
    own, critic = adam(model.parameters()), adam(other.parameters())
    before = stepped(model, adam(model.parameters()))
    state, of_critic, weights = heard(model, own), heard(other, critic), heard(model, None)
    both = heard(model, own, other=other, second=critic)
    kept = [
        stepped(model, own),
        stepped(other, critic),
        stepped(model, paddle.optimizer.SGD(0.1, parameters=model.parameters())),
    ]
    assert [noted(one) for one in (state, of_critic, weights, both)] == [[], [], [], []]
    kept += [before, stepped(model, adam(model.parameters()))]
    assert [len(noted(one)) for one in (state, of_critic, weights, both)] == [1, 0, 0, 1], "of the last one alone"


class Trainer:
    """An object of the user's own, which saves its optimizers by itself."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def state_dict(self) -> Any:
        return {"steps": 1}

    def load_state_dict(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("entry", [Trainer, lambda inner: paddle.optimizer.lr.StepDecay(0.1, 2)], ids=["own", "paddle's"])
def test_one_inside_of_an_object_of_the_users_own_is_not_named(entry: Callable[[Any], Any]) -> None:
    model = network()
    inner = adam(model[1].parameters())
    state = heard(model, adam(model[0].parameters()), trainer=entry(inner))
    stepped(model, inner)
    assert bool(noted(state)) == (entry is not Trainer)


def test_a_save_warns_of_it(tmp_path: Path) -> None:
    model = network()
    with holdfast_paddle.attach(model, adam(model.parameters()), "run", at=tmp_path) as attached:
        again = stepped(model, adam(model.parameters()))
        with pytest.warns(
            LeftOutWarning, match="what the AdamW that steps 0.bias and 3 more keeps, because .* attach again"
        ):
            attached.save(1, wait="durable")
        stepped(model, again)


@pytest.mark.parametrize("method", ["step", "minimize"])
@pytest.mark.parametrize(
    ("entries", "named"),
    [
        (lambda own: {}, True),
        (lambda own: {"scaler": scaler_of("half")}, True),
        (lambda own: {"scaler": own}, False),
        (lambda own: {"more": {"amp": own}}, False),
        (lambda own: {"more": {"trainer": Trainer(own)}}, False),
    ],
    ids=["none", "another", "given", "under its own name", "inside an object"],
)
def test_a_scaler_that_is_not_in_the_state_is_named(
    tmp_path: Path, entries: Callable[[Any], dict[str, Any]], named: bool, method: str
) -> None:
    """Not a disabled one, and not that of an optimizer outside the state."""
    model, other = network(), network()
    scaler, elsewhere = scaler_of("half"), scaler_of("half")
    optimizer, critic = adam(model.parameters()), adam(other.parameters())
    with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path, **entries(scaler)) as attached:
        scaled(model, optimizer, scaler_of("plain"), method)
        scaled(other, critic, elsewhere, method)
        assert not any("GradScaler" in note for note in attached.save(1, wait="durable").notes)
        scaled(model, optimizer, scaler, method)
        if not named:
            assert not any("GradScaler" in note for note in attached.save(2, wait="durable").notes)
            return
        with pytest.warns(LeftOutWarning, match=r"the GradScaler that steps the AdamW, .* attach\(…, scaler=scaler\)"):
            attached.save(2, wait="durable")


def scaled(model: Any, optimizer: Any, scaler: Any, method: str) -> None:
    loss = scaler.scale(loss_of(model))
    loss.backward()
    if method == "step":
        scaler.step(optimizer)
        scaler.update()
    else:
        scaler.minimize(optimizer, loss)
    optimizer.clear_grad()

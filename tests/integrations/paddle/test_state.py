"""The state of a Paddle training is saved, and restored bit for bit into new objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import paddle
import pytest
from paddle import nn

from holdfast import Checkpointer
from holdfast.integrations import paddle as holdfast_paddle
from holdfast.integrations.paddle.entries import RANDOM
from holdfast_formats.errors import InvalidRequest, StateMismatch

pytestmark = pytest.mark.filterwarnings("ignore:::paddle")
paddle.set_device("cpu")


class Training(NamedTuple):
    """A model, its optimizer and its schedule."""

    model: Any
    optimizer: Any
    rate: Any

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = (self.model(paddle.randint(0, 20, [4, 5])) ** 2).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            if not isinstance(self.rate, float):
                self.rate.step()
            losses.append(float(loss))
        return losses

    @property
    def values(self) -> dict[str, np.ndarray]:
        found = {name: tensor.numpy() for name, tensor in self.model.state_dict().items()}
        own = {tensor.name: name for name, tensor in self.model.state_dict().items()}
        for kind, by_owner in self.optimizer._accumulators.items():
            found.update({f"{own[owner]}/{kind}": tensor.numpy() for owner, tensor in by_owner.items()})
        return found


def training(seed: int, kind: str = "AdamW", **options: Any) -> Training:
    paddle.seed(seed)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 4))
    rate = options.pop("rate", 0.01)
    optimizer = getattr(paddle.optimizer, kind)(rate, parameters=model.parameters(), **options)
    return Training(model, optimizer, rate)


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.tobytes() == other[name].tobytes(), name


def continued(first: Training, second: Training, root: Path, **more: Any) -> None:
    """Assert that the second goes on from a checkpoint of the first as the first does itself."""
    first.steps(5)
    with holdfast_paddle.attach(first.model, first.optimizer, "run", at=root, **more) as attached:
        attached.save(5, wait="durable")
        expected = first.steps(4)
    with holdfast_paddle.attach(second.model, second.optimizer, "run", at=root, **more) as attached:
        assert attached.restore() == 5
        assert second.steps(4) == expected
    assert_equal(first.values, second.values)


@pytest.mark.parametrize("stepped", [0, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("AdamW", {"weight_decay": 0.1, "apply_decay_param_fun": lambda name: ".w_" in name, "amsgrad": True}),
        ("Adam", {"weight_decay": 0.1, "use_multi_tensor": True}),
        ("Momentum", {"momentum": 0.8, "use_nesterov": True, "weight_decay": 0.01}),
        ("SGD", {}),
        ("Adamax", {}),
        ("Lamb", {}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adagrad", {}),
        ("Adadelta", {}),
        ("RMSProp", {"centered": True, "momentum": 0.5}),
        ("Rprop", {"learning_rate_range": (1e-5, 0.1)}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_optimizer_continues(tmp_path: Path, kind: str, options: dict[str, Any], stepped: int) -> None:
    """Also one that has taken steps of another training."""
    first, second = training(1, kind, **options), training(2, kind, **options)
    second.steps(stepped)
    continued(first, second, tmp_path)


def test_state_of_another_shape_than_its_parameter_is_refused(tmp_path: Path) -> None:
    """Such as a stack of gradients, of which the model's program makes nothing."""
    one = training(1, "ASGD", batch_num=3)
    one.steps(1)
    with pytest.raises(InvalidRequest, match=r"ASGD keeps 'y' of 0.weight in shape \[3, 20, 8\]"):
        holdfast_paddle.attach(one.model, one.optimizer, "run", at=tmp_path)


def test_a_checkpoint_has_the_names_of_torch(tmp_path: Path) -> None:
    """Moments, steps and hyper-parameters are stored as those of torch's AdamW; the powers of beta follow from the steps."""
    one = training(1, weight_decay=0.1, apply_decay_param_fun=lambda name: ".w_" in name)
    one.steps(3)
    state = holdfast_paddle.state(one.model, one.optimizer)
    assert set(state) == {"model", "optimizer", RANDOM}
    shards = state["optimizer"]
    assert {key for kept in shards.state().values() for key in kept} == {"exp_avg", "exp_avg_sq", "step"}
    assert [kept["step"].item() for kept in shards.state().values()] == [3.0] * 7
    decayed, others = shards.groups()
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert decayed["params"] == ["0.weight", "1.weight", "2.weight", "4.weight"]
    assert others == {**others, "betas": (0.9, 0.999), "eps": 1e-08, "lr": 0.01}
    with Checkpointer("run", state, at=tmp_path) as checkpointer:
        checkpointer.save(3, wait="durable")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("saved", "live"), [(0.1, None), (0.1, 0.3), (None, 0.3)])
def test_the_decay_of_momentum_is_stored_and_restored(tmp_path: Path, saved: Any, live: Any, grouped: bool) -> None:
    """As `weight_decay`, as torch has it; also into an optimizer that was constructed with another one or without any."""

    def made(seed: int, decay: Any) -> Training:
        paddle.seed(seed)
        model = nn.Embedding(20, 8)
        parameters: Any = [{"params": model.parameters(), "weight_decay": decay}] if grouped else model.parameters()
        optimizer = paddle.optimizer.Momentum(0.1, parameters=parameters, weight_decay=None if grouped else decay)
        return Training(model, optimizer, 0.1)

    first = made(1, saved)
    (group,) = holdfast_paddle.state(first.model, first.optimizer)["optimizer"].groups()
    assert group["weight_decay"] == (saved or 0.0)
    continued(first, made(2, live), tmp_path)


@pytest.mark.parametrize("kind", ["Momentum", "Adam"])
@pytest.mark.parametrize("saved", [0.1, paddle.regularizer.L1Decay(0.2), None])
@pytest.mark.parametrize("stepped", [0, 1])
def test_a_decay_is_not_restored_over_another_regularizer(tmp_path: Path, kind: str, saved: Any, stepped: int) -> None:
    """Before anything changes: the training goes on and is saved as if there had been no restore."""
    first = training(1, kind, weight_decay=saved)
    second = training(2, kind, weight_decay=paddle.regularizer.L1Decay(0.1))
    first.steps(1)
    second.steps(stepped)
    before = second.values
    with holdfast_paddle.attach(first.model, first.optimizer, "run", at=tmp_path) as attached:
        attached.save(1, wait="durable")
    with holdfast_paddle.attach(second.model, second.optimizer, "run", at=tmp_path) as attached:
        with pytest.raises(StateMismatch, match=r"weight_decay|l1_decay"):
            attached.restore()
        attached.state["optimizer"].state()
        assert_equal(second.values, before)
        second.steps(1)
        attached.save(2, existing="replace", wait="durable")


@pytest.mark.parametrize("kind", ["SGD", "Momentum", "Adam", "AdamW"])
@pytest.mark.parametrize("decay", [paddle.regularizer.L1Decay, paddle.regularizer.L2Decay])
def test_a_decay_of_single_parameters_is_stored_and_compared(kind: str, decay: Any) -> None:
    def made(seed: int, coefficient: float | None) -> Training:
        paddle.seed(seed)
        own = None if coefficient is None else paddle.ParamAttr(regularizer=decay(coefficient))
        model = nn.Sequential(nn.Embedding(20, 8), nn.Embedding(20, 8, weight_attr=own))
        optimizer = getattr(paddle.optimizer, kind)(0.1, parameters=model.parameters(), weight_decay=0.01)
        return Training(model, optimizer, 0.1)

    def shards(one: Training) -> Any:
        return holdfast_paddle.state(one.model, one.optimizer)["optimizer"]

    def saved(one: Training) -> list[float]:
        name = "l1_decay" if decay is paddle.regularizer.L1Decay else "l2_decay" if kind == "AdamW" else "weight_decay"
        return [group[name] for group in shards(one).groups()]

    assert saved(made(1, 0.5))[1:] == [0.5] and saved(made(1, None))[1:] == []
    stored = shards(made(1, 0.5)).groups()
    hyper = [{name: value for name, value in group.items() if name != "params"} for group in stored]
    shards(made(2, 0.5)).check(hyper, {})
    with pytest.raises(StateMismatch, match=r"decay 0\.5, and the live optimizer 0\.25, which ParamAttr"):
        shards(made(2, 0.25)).check(hyper, {})


@pytest.mark.parametrize("grouped", [False, True])
def test_an_l1_decay_is_compared(tmp_path: Path, grouped: bool) -> None:
    """As it is a function of the live optimizer's class, it is not set."""

    def made(seed: int, coefficient: float) -> Training:
        paddle.seed(seed)
        model, decay = nn.Embedding(20, 8), paddle.regularizer.L1Decay(coefficient)
        parameters: Any = [{"params": model.parameters(), "weight_decay": decay}] if grouped else model.parameters()
        return Training(model, paddle.optimizer.SGD(0.1, parameters, None if grouped else decay), 0.1)

    continued(made(1, 0.1), made(2, 0.1), tmp_path / "same")
    first, second = made(1, 0.1), made(2, 0.2)
    with holdfast_paddle.attach(first.model, first.optimizer, "run", at=tmp_path) as attached:
        attached.save(1, wait="durable")
    with holdfast_paddle.attach(second.model, second.optimizer, "run", at=tmp_path) as attached:
        with pytest.raises(StateMismatch, match=r"l1_decay 0\.1, and the live optimizer 0\.2"):
            attached.restore()
        assert attached.restore(keep=("optimizer/l1_decay",)) == 1

"""Layers and optimizers of Paddle that are not plain: each is stored as a whole, or refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import torch
from paddle import nn

from holdfast import Checkpointer, SaveWarning
from holdfast.integrations import paddle as holdfast_paddle
from holdfast.integrations.paddle import beta_powers, versions
from holdfast.integrations.paddle.documents import Scaler, Scheduler
from holdfast.integrations.paddle.entries import RANDOM
from holdfast.integrations.paddle.random_streams import PaddleStreams
from holdfast.stage.background_copy import BackgroundCopy
from holdfast.stage.replica_claims import buffers_of
from holdfast.tensors import json_values
from holdfast_formats.errors import InvalidRequest, StateMismatch, TornSnapshot

pytestmark = pytest.mark.filterwarnings("ignore:::paddle")
paddle.set_device("cpu")
lr = paddle.optimizer.lr
WIDE = 1100  # elements whose bytes are copied in the background


class Tied(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight

    def forward(self, x: Any) -> Any:
        return self.other(self.one(x))


class Kinds(nn.Layer):
    """Buffers of every kind, one that is not saved, and memory that is not in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for kind in ("bool", "int8", "int64", "float16", "bfloat16", "float64", "complex64", "float8_e4m3fn"):
            self.register_buffer(f"of_{kind}", (paddle.rand([3, 5]) * 3).astype(kind))
        self.register_buffer("empty", paddle.zeros([0, 3]))
        self.register_buffer("number", paddle.rand([]))
        self.register_buffer("columns", paddle.rand([4, 6])[:, ::2])
        self.register_buffer("unsaved", paddle.zeros([2]), persistable=False)

    def forward(self, x: Any) -> Any:
        return self.linear(x)


class Recurrent(nn.Layer):
    """It has a buffer that is not saved, and that has no memory on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4)

    def forward(self, x: Any) -> Any:
        return self.lstm(x.unsqueeze(0))[0]


def frozen() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.stop_gradient = True
    return model


def two_groups(model: Any) -> list[dict[str, Any]]:
    first, second = model.sublayers()
    return [
        {"params": first.parameters(), "learning_rate": 0.1, "weight_decay": 0.3, "beta1": 0.8},
        {"params": second.parameters()},
    ]


def take_steps(model: Any, optimizer: Any, count: int = 2) -> None:
    paddle.seed(count)
    for _ in range(count):
        (model(paddle.rand([3, 4])) ** 2).mean().backward()
        optimizer.step()
        optimizer.clear_grad()


def bits(model: Any) -> dict[str, bytes]:
    """Shape, dtype and content of everything that the layer saves."""
    views = ((name, torch.utils.dlpack.from_dlpack(tensor.detach())) for name, tensor in model.state_dict().items())
    return {
        name: f"{view.dtype}{list(view.shape)}".encode() + view.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, view in views
        if view.numel()
    }


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (frozen, None),
        (Tied, None),
        (Kinds, None),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1D(4)), None),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), two_groups),
        (lambda: paddle.jit.to_static(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), None),
        (Recurrent, None),
    ],
    ids=["frozen", "tied", "kinds", "buffers", "groups", "static", "recurrent"],
)
def test_a_layer_continues(tmp_path: Path, make: Any, parameters: Any) -> None:
    """Its bits are those of the saved one, and so are they after more steps."""
    trained = []
    for seed in (1, 2):
        paddle.seed(seed)
        model = make()
        given = model.parameters() if parameters is None else parameters(model)
        trained.append((model, paddle.optimizer.AdamW(0.01, parameters=given, weight_decay=0.1)))
    (model, optimizer), (other, second) = trained
    take_steps(model, optimizer, 3)
    with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path) as attached:
        attached.save(3, wait="durable")
    with holdfast_paddle.attach(other, second, "run", at=tmp_path) as attached:
        assert attached.restore() == 3
    assert bits(model) == bits(other)
    take_steps(model, optimizer)
    take_steps(other, second)
    assert bits(model) == bits(other)


def test_several_models_have_their_own_groups() -> None:
    """Each optimizer is stored by the names of its model's parameters."""
    model, critic = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = paddle.optimizer.Adam(0.01, parameters=critic.parameters())
    take_steps(critic, optimizer)
    state = holdfast_paddle.state(model, critic=critic, critic_optimizer=optimizer)
    assert set(state["critic_optimizer"].state()) == {"critic.weight", "critic.bias"}


def refused(model: Any, optimizer: Any) -> None:
    state = holdfast_paddle.state(model, optimizer)
    state["optimizer"].groups()
    state["optimizer"].state()


def test_what_would_be_lost_is_refused() -> None:
    """By the name of the parameter or of the optimizer."""
    model, stranger = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(InvalidRequest, match=rf"steps '{stranger.weight.name}'"):
        refused(model, paddle.optimizer.SGD(parameters=[*model.parameters(), *stranger.parameters()]))
    adam = paddle.optimizer.Adam(parameters=model.parameters())
    take_steps(model, adam)
    before, model.weight.name = model.weight.name, "renamed"
    with pytest.raises(InvalidRequest, match=f"keeps 'moment1' of '{before}'"):
        refused(model, adam)
    model.weight.name = before
    with pytest.raises(InvalidRequest, match="LBFGS keeps state"):
        refused(model, paddle.optimizer.LBFGS(parameters=model.parameters()))
    with pytest.raises(InvalidRequest, match="LookAhead keeps state"):
        refused(model, paddle.incubate.LookAhead(adam, alpha=0.2, k=2))
    with pytest.raises(InvalidRequest, match="not a layer of Paddle"):
        holdfast_paddle.state(torch.nn.Linear(2, 2))
    with paddle.LazyGuard(), pytest.raises(InvalidRequest, match="weight has no memory yet"):
        holdfast_paddle.state(nn.Linear(4, 4))


@pytest.mark.parametrize("way", ["step", "minimize", "apply_gradients"])
def test_a_step_waits_until_the_save_has_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """By whichever method it is taken: it begins the copy where no thread has begun it."""
    model = nn.Linear(256, 256)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    copies = held_copies(monkeypatch)
    with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path) as attached:
        loss = (model(paddle.rand([1, 256])) ** 2).mean()
        loss.backward()
        expected, ticket = bits(model), attached.save(1)
        if way == "minimize":
            optimizer.minimize(loss)
        else:
            getattr(optimizer, way)(*[[(one, one.grad) for one in model.parameters()]] * (way != "step"))
        assert bits(model) != expected
        copies.begin()
        ticket.result(60)
        attached.checkpointer.restore(1, groups=("model",))
    assert bits(model) == expected


def test_a_change_between_save_and_copy_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paddle's writes count no versions in torch: words of each tensor are compared."""
    model = nn.Linear(256, 256)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters())
    copies = held_copies(monkeypatch)
    other = {name: tensor * 2 for name, tensor in model.state_dict().items()}
    attached = holdfast_paddle.attach(model, optimizer, "run", at=tmp_path)
    attached.save(1)
    model.set_state_dict(other)
    copies.begin()
    with pytest.raises(TornSnapshot, match="model/weight changed while the save was being copied"):
        attached.close()


def test_moments_of_a_replaced_layer_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
    take_steps(model, optimizer)
    model.add_sublayer("0", nn.Linear(4, 4))
    optimizer._parameter_list = optimizer._param_groups = model.parameters()
    with pytest.raises(InvalidRequest, match="which is none of its parameters") as refused:
        holdfast_paddle.state(model, optimizer)["optimizer"].state()
    assert "construct the optimizer again, and attach it" in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, WIDE), nn.BatchNorm1D(WIDE)),
        lambda: nn.utils.spectral_norm(nn.Linear(4, WIDE)),
    ],
    ids=["BatchNorm1D", "spectral_norm"],
)
def test_a_forward_may_follow_a_save_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    """What it changes is a buffer: copied before `save()` returns, and on each rank another one."""
    model, copies = make(), held_copies(monkeypatch)
    optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    take_steps(model, optimizer)
    attached = holdfast_paddle.attach(model, optimizer, "run", at=tmp_path)
    attached.save(2)
    saved = bits(model)
    model(paddle.rand([3, 4]))
    changed = {name for name, content in bits(model).items() if content != saved[name]}
    copies.begin()
    attached.close()
    own = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    assert changed and {own[name] for name in changed} <= buffers_of(holdfast_paddle.state(model, optimizer))
    other = make()
    second = paddle.optimizer.SGD(0.01, parameters=other.parameters())
    with holdfast_paddle.attach(other, second, "run", at=tmp_path) as attached:
        attached.restore()
    assert bits(other) == saved


class HeldCopies:
    """Copies in the background that begin when they are let, or are waited for."""

    def __init__(self) -> None:
        self.copies: list[BackgroundCopy] = []
        self._start = BackgroundCopy.start

    def begin(self) -> None:
        for copy in self.copies:
            self._start(copy)


def held_copies(monkeypatch: pytest.MonkeyPatch) -> HeldCopies:
    held = HeldCopies()
    monkeypatch.setattr(BackgroundCopy, "start", lambda copy: held.copies.append(copy))
    return held


def test_a_refused_restore_leaves_a_fresh_optimizer_fresh(tmp_path: Path) -> None:
    """What was made for it goes again, and the masters with it: they would be those of other weights."""
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), amsgrad=True)
    take_steps(model, optimizer)
    with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path) as attached:
        attached.save(2, wait="durable")
    fresh, before = paddle.optimizer.AdamW(0.01, parameters=other.parameters()), bits(other)
    with holdfast_paddle.attach(other, fresh, "run", at=tmp_path) as attached:
        with pytest.raises(StateMismatch, match="AdamW keeps no 'max_exp_avg_sq'"):
            attached.restore()
        assert attached.state["optimizer"].state() == {}
    assert bits(other) == before and not any(fresh._accumulators.values()) and not fresh._master_weights


def test_hyper_parameters_come_from_the_checkpoint_and_a_notice_says_so(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = paddle.optimizer.AdamW(0.01, parameters=model.parameters(), beta2=0.95, weight_decay=0.2)
    take_steps(model, optimizer)
    optimizer.set_lr(0.003)
    with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path) as attached:
        attached.save(2, wait="durable")
    second = paddle.optimizer.AdamW(0.01, parameters=other.parameters())
    with holdfast_paddle.attach(other, second, "run", at=tmp_path) as attached:
        attached.restore()
        assert "weight_decay 0.01 by 0.2" in attached.checkpointer.notices[0]
    assert (second.get_lr(), second._beta2, second._weight_decay) == (0.003, 0.95, 0.2)


def test_a_learning_rate_that_no_scheduler_moves_is_a_hyper_parameter_too(tmp_path: Path) -> None:
    """A notice names the given one that the checkpoint's replaces, and the `keep=` that it names keeps the given one."""
    model = nn.Linear(4, 4)
    for rate, keep, expected in ((0.01, (), 0.01), (0.5, (), 0.01), (0.5, ("optimizer/lr",), 0.5)):
        optimizer = paddle.optimizer.SGD(rate, parameters=model.parameters())
        with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path) as attached:
            step = attached.restore(keep=keep)
            notices = [notice for notice in attached.checkpointer.notices if "lr 0.5 by 0.01" in notice]
            assert len(notices) == (optimizer.get_lr() != rate)
            assert all("keep=('optimizer/lr',)" in notice for notice in notices)
            assert optimizer.get_lr() == expected
            if step == 0:
                attached.save(1, wait="durable")


def test_an_optimizer_that_is_none_of_paddle_and_a_taken_name_are_refused(tmp_path: Path) -> None:
    """With what to pass, before anything is saved."""
    model = nn.Linear(4, 4)
    optimizer = paddle.optimizer.SGD(0.01, parameters=model.parameters())
    for given in ([optimizer], {"one": optimizer}, torch.optim.SGD([torch.zeros(1)])):
        with pytest.raises(InvalidRequest, match="not an optimizer of Paddle") as refused:
            holdfast_paddle.attach(model, given, "run", at=tmp_path)
        assert "more={'second': other}" in refused.value.hint
    with pytest.raises(InvalidRequest, match="'scheduler' is one of the training's own"):
        holdfast_paddle.attach(model, optimizer, "run", at=tmp_path, more={"scheduler": {}})


def test_fence_lets_weights_be_changed_after_a_save(tmp_path: Path) -> None:
    model, other = nn.Linear(2000, 2000), nn.Linear(2000, 2000)
    before = bits(model)
    with holdfast_paddle.attach(model, None, "run", at=tmp_path) as attached:
        attached.save(1)
        attached.fence()
        with paddle.no_grad():
            model.weight.scale_(3.0)
    with holdfast_paddle.attach(other, None, "run", at=tmp_path) as attached:
        attached.restore()
    assert bits(other) == before


def test_a_checkpoint_of_torch_continues(tmp_path: Path) -> None:
    """Its AdamW has no powers of beta: they are those that Paddle would have after so many steps."""
    values = torch.randn(3, 4)
    theirs, model = torch.nn.LayerNorm(4), nn.LayerNorm(4)
    adam = torch.optim.AdamW(theirs.parameters(), 0.01, betas=(0.9, 0.95), weight_decay=0.1)

    def step_of_torch() -> None:
        adam.zero_grad()
        (theirs(values) ** 3).sum().backward()
        adam.step()

    for _ in range(3):
        step_of_torch()
    with Checkpointer("run", {"model": theirs, "optimizer": adam}, at=tmp_path) as checkpointer:
        checkpointer.save(3, wait="durable")
    optimizer = paddle.optimizer.AdamW(0.5, parameters=model.parameters())
    with holdfast_paddle.attach(model, optimizer, "run", at=tmp_path) as attached:
        attached.restore()
        assert any("no random states of paddle" in notice for notice in attached.checkpointer.notices)
    powers = optimizer._accumulators["beta2_pow_acc"][model.weight.name]
    assert powers.item() == beta_powers.power(0.95, 3)
    step_of_torch()
    (model(paddle.to_tensor(values.numpy())) ** 3).sum().backward()
    optimizer.step()
    assert np.allclose(model.weight.numpy(), theirs.weight.detach().numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: lr.NoamDecay(64, 10),
        lambda: lr.PiecewiseDecay([3, 6], [0.1, 0.05, 0.01]),
        lambda: lr.PolynomialDecay(0.1, 20),
        lambda: lr.MultiStepDecay(0.1, [3, 6]),
        lambda: lr.LambdaDecay(0.1, lambda step: 0.9**step),
        lambda: lr.MultiplicativeDecay(0.1, lambda step: 0.9),
        lambda: lr.ReduceOnPlateau(0.1, patience=1, cooldown=2),
        lambda: lr.OneCycleLR(0.1, 20),
        lambda: lr.CyclicLR(0.01, 0.1, 4),
        lambda: lr.LinearLR(0.1, 10),
        lambda: lr.CosineAnnealingDecay(0.1, 10),
        lambda: lr.CosineAnnealingWarmRestarts(0.1, 4),
        lambda: lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 10), 3, 0.0, 0.1),
        lambda: lr.LinearWarmup(0.1, 3, 0.0, 0.1),
        lambda: lr.LinearWarmup(lr.CosineAnnealingWarmRestarts(0.1, 4), 1, 0.0, 0.1),
    ],
)
def test_a_schedule_continues(make: Any) -> None:
    """From what is stored of it."""
    first, second = make(), make()
    losses = ([paddle.to_tensor(value)] if isinstance(first, lr.ReduceOnPlateau) else [] for value in (3.0, 2.0, 2.5) * 4)
    given = list(losses)
    for one in given[:5]:
        first.step(*one)
    stored = json_values.loads(json_values.dumps(Scheduler(first).state_dict(), "scheduler"), "scheduler")
    Scheduler(second).refuse_unfit(stored)
    Scheduler(second).load_state_dict(stored)
    for one in given[5:]:
        assert first() == second()
        first.step(*one)
        second.step(*one)


def test_a_schedule_of_another_kind_and_a_scale_without_a_scaler_are_refused() -> None:
    plateau, cosine = lr.ReduceOnPlateau(0.1), lr.CosineAnnealingDecay(0.1, 10)
    with pytest.raises(StateMismatch, match="cooldown_counter"):
        Scheduler(cosine).refuse_unfit(plateau.state_dict())
    scaler = Scaler(paddle.amp.GradScaler(enable=False))
    scaler.refuse_unfit({})
    with pytest.raises(StateMismatch, match="incr_ratio"):
        scaler.refuse_unfit({"incr_ratio": 2.0})


def test_random_streams_continue() -> None:
    """Those of the CPU, and the named ones of fleet's tracker."""
    from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

    tracker, streams = get_rng_state_tracker(), PaddleStreams()
    tracker.reset()
    tracker.add("local", 5)

    def drawn() -> list[np.ndarray]:
        with tracker.rng_state("local"):
            local = paddle.rand([3]).numpy()
        return [local, paddle.rand([3]).numpy(), paddle.nn.functional.dropout(paddle.ones([50]), 0.5).numpy()]

    drawn()
    stored = json_values.loads(json_values.dumps(streams.state_dict(), RANDOM), RANDOM)
    expected = drawn()
    paddle.seed(99)
    streams.refuse_unfit(stored)
    streams.load_state_dict(stored)
    assert all(np.array_equal(one, other) for one, other in zip(expected, drawn(), strict=True))
    tracker.reset()
    with pytest.raises(StateMismatch, match="'local' of fleet's tracker"):
        streams.refuse_unfit(stored)


TRAINING = """
import sys, paddle
from holdfast.integrations.paddle import attach
layer = paddle.nn.Linear(2, 2)
optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
with attach(layer, optimizer, "run", at=sys.argv[1]) as attached:
    for step in range(attached.restore() + 1, 3):
        layer(paddle.ones([1, 2])).sum().backward()
        optimizer.step()
        attached.save(step)
    assert attached.restore() == 2
assert "torch._dynamo" not in sys.modules
"""


def test_a_training_loads_no_compiler_of_torch(tmp_path: Path) -> None:
    """Which would take each start more than a second."""
    done = subprocess.run([sys.executable, "-c", TRAINING, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_random_streams_are_installed_once_more(tmp_path: Path) -> None:
    """After something has drawn from them between the restore and the loop."""
    model = nn.Linear(2, 2)
    with holdfast_paddle.attach(model, None, "run", at=tmp_path) as attached:
        attached.save(1, wait="durable")
        expected = paddle.rand([3]).numpy()
        attached.restore()
        paddle.rand([5])
        attached.checkpointer.restore_random()
    assert np.array_equal(paddle.rand([3]).numpy(), expected)


def test_a_new_rank_draws_other_numbers() -> None:
    streams, before = PaddleStreams(), PaddleStreams().state_dict()
    drawn = []
    for seed in (1, 2, 1):
        mixed = streams.mixed(before, seed)
        assert streams.state_dict() == before and mixed["cpu"] != before["cpu"]
        streams.load_state_dict(mixed)
        drawn.append(paddle.rand([3]).numpy().tolist())
        streams.load_state_dict(before)
    assert drawn[0] == drawn[2] != drawn[1]
    assert streams.absent({**before, "gpu.99": before["cpu"]}) == ["paddle gpu.99"]


def test_another_version_of_paddle_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "TESTED", "9.9.9")
    versions.check_version.cache_clear()
    try:
        with pytest.warns(SaveWarning, match=f"9.9.9, and this is {paddle.__version__}") as told:
            holdfast_paddle.state(nn.Linear(2, 2))
            holdfast_paddle.state(nn.Linear(2, 2))
        assert len(told) == 1
    finally:
        versions.check_version.cache_clear()

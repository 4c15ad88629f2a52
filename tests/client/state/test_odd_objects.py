"""What else users put into a state: objects of torch, numpy and Python come back, or the refusal says what to write."""

from __future__ import annotations

import inspect
import io
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DistributedSampler, RandomSampler, TensorDataset

from holdfast.state.train_state import TrainState
from holdfast_formats.errors import CheckpointError, InvalidRequest, StateMismatch
from tests.client.checkpoint_in_memory import restore, save
from tests.client.state.test_object_table import held


def schedule(module: nn.Module) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(module.parameters(), lr=0.1), 1)


class Holding:
    """An object that is asked for its state, and has what it is given."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held = state


@pytest.mark.parametrize(
    ("state", "place", "line"),
    [
        ({"nets": {"actor": nn.Linear(1, 1)}}, "nets.actor", 'state["nets_actor"] = state["nets"]["actor"]'),
        ({"nets": [nn.Linear(1, 1)]}, "nets[0]", 'state["nets_0"] = state["nets"][0]'),
        ({"plans": [schedule(nn.Linear(1, 1))]}, "plans[0]", 'state["plans_0"] = state["plans"][0]'),
        ({"a": {"b": ({"c": torch.amp.GradScaler("cpu")},)}}, "a.b[0].c", 'state["a_b_0_c"] = state["a"]["b"][0]["c"]'),
        ({"o": {"n": 1, "sgd": torch.optim.SGD([torch.zeros(1)])}}, "o.sgd", 'state["o_sgd"] = state["o"]["sgd"]'),
        (
            {"loader": torch.utils.data.DataLoader([1, 2])},
            "loader",
            "torchdata.stateful_dataloader import StatefulDataLoader",
        ),
        (
            {"data": {"train": torch.utils.data.DataLoader([1])}},
            "data.train",
            'state["data"] = {"epoch": epoch, "batch": batch}',
        ),
        ({"a": {"g": torch.Generator()}}, "a.g", 'state["a_g"] = state["a"]["g"]'),
        ({"loader": Holding({"g": torch.Generator()})}, "loader.g", "= generator.get_state()"),
        ({"loader": Holding({"s": schedule(nn.Linear(1, 1))})}, "loader.s", 'state_dict()["s"].state_dict()'),
    ],
)
def test_a_refusal_says_which_line_to_write(state, place, line):
    """The place of the object, and the line that makes it part of the checkpoint."""
    with pytest.raises(InvalidRequest) as refusal:
        save(state)
    assert refusal.value.detail.startswith(f"{place}: ")
    assert line in refusal.value.hint


def test_the_line_that_a_refusal_gives_works():
    """An entry of its own: the module, the schedule and the generator come back then."""

    def make(seed: int) -> dict:
        torch.manual_seed(seed)
        nets = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
        state: dict = {f"nets_{name}": net for name, net in nets.items()}
        plan = schedule(nets["actor"])
        plan.last_epoch = seed
        return state | {"plans_0": plan, "g": torch.Generator().manual_seed(seed).get_state()}

    live = make(2)
    restore(save(make(1)), live)
    again = make(1)
    assert all(torch.equal(live[key].weight, again[key].weight) for key in ("nets_actor", "nets_critic"))
    assert live["plans_0"].last_epoch == 1 and torch.equal(live["g"], again["g"])


def test_gradients_come_back_between_the_steps_of_accumulation():
    """`.grad` is no part of the state; handed over as tensors, as the README says, training goes on to the bit."""

    def make(seed: int) -> dict:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        grads = {name: p.grad for name, p in model.named_parameters()}
        return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1), "grads": grads}

    def accumulate(state: dict, seed: int) -> None:
        batch = torch.rand(4, 3, generator=torch.Generator().manual_seed(seed))
        state["model"](batch).square().sum().backward()

    def step(state: dict) -> None:
        state["optim"].step()
        state["optim"].zero_grad(set_to_none=False)

    one, other = make(1), make(2)
    accumulate(one, 0)
    step(one)
    accumulate(one, 1)
    restore(save(one), other)
    for state in (one, other):
        accumulate(state, 2)
        step(state)
        accumulate(state, 3)
    for name, parameter in one["model"].named_parameters():
        twin = other["model"].get_parameter(name)
        assert torch.equal(parameter, twin) and torch.equal(parameter.grad, twin.grad) and twin.grad is other["grads"][name]


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


class Decay:
    """A callable object, whose attributes a LambdaLR stores."""

    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, epoch: int) -> float:
        return self.base**epoch


def normed(kind: Callable[..., nn.Module]) -> nn.Module:
    module = kind(nn.Linear(2, 2))
    module(torch.rand(1, 2))
    return module


def parametrized() -> nn.Module:
    module = nn.Linear(2, 2)
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def frozen() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.requires_grad_(False)
    return module


def averaged(**options: Any) -> nn.Module:
    module = AveragedModel(nn.BatchNorm1d(2), **options)
    for _ in range(3):
        module.update_parameters(nn.BatchNorm1d(2))
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "parametrized": parametrized,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(2, 2)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(2, 2)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(2, 2)),
    "old spectral_norm": lambda: normed(nn.utils.spectral_norm),
    "frozen": frozen,
    "channels last": lambda: nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last),
    "complex": lambda: nn.Linear(2, 2, dtype=torch.complex64),
    "recurrent": lambda: nn.LSTM(2, 2),
    "attention": lambda: nn.MultiheadAttention(2, 1),
    "parameter dict": lambda: nn.ParameterDict({"a": torch.rand(2)}),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "traced": lambda: torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.rand(3, 2)),
    "scripted inside": lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.BatchNorm1d(2)),
    "averaged": averaged,
    "averaged with buffers": lambda: averaged(use_buffers=True),
    "ema": lambda: averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "tied": lambda: tied(),
}


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore")  # torch deprecates some of these
def test_every_module_comes_back(kind):
    """All that its state_dict has, into the very tensors of a fresh one, and once more after that."""
    live, twin = made(MODULES[kind], 1), made(MODULES[kind], 2)
    before = [tensor.data_ptr() for tensor in twin.state_dict().values()]
    assert held({"model": live}) != held({"model": twin})
    state = TrainState({"model": live}, 0, 1)
    assert state.snapshot() and {leaf.key for leaf in state.snapshot().leaves} == {
        leaf.key for leaf in state.snapshot().leaves
    }
    restore(save({"model": live}), {"model": twin})
    assert held({"model": live}) == held({"model": twin})
    assert before == [tensor.data_ptr() for tensor in twin.state_dict().values()]


def made(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    module = make()
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point() and name.endswith("running_mean"):
            buffer.fill_(seed)
    return module


REFUSED_MODULES = {
    "lazy": (lambda: nn.LazyLinear(2), "weight"),
    "quantized": (lambda: torch.ao.nn.quantized.Linear(2, 2), "scale"),
}


@pytest.mark.parametrize("kind", REFUSED_MODULES)
@pytest.mark.filterwarnings("ignore")
def test_modules_without_memory_of_their_own_are_refused(kind):
    """By the first tensor that could not be filled."""
    make, name = REFUSED_MODULES[kind]
    with pytest.raises(InvalidRequest, match=f"model[./]{name}"):
        save({"model": make()})


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "SWALR": lambda o: SWALR(o, 0.05),
    "callable object": lambda o: lr_scheduler.LambdaLR(o, Decay(0.9)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, Decay(0.9)),
    "own scale": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, scale_fn=lambda x: x / 2),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused": lambda m: torch.optim.AdamW(m.parameters(), fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), foreach=True),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.1)),
    "groups": lambda m: torch.optim.AdamW([{"params": [m.weight]}, {"params": [m.bias], "lr": 0.5}]),
}


def training(make: Callable[[nn.Module], Any], plan: Callable[[Any], Any], seed: int) -> dict:
    torch.manual_seed(seed)
    module = nn.Linear(2, 2)
    optimizer = make(module)
    state = {"model": module, "optim": optimizer, "plan": plan(optimizer)}
    for _ in range(seed):
        train(state)
    return state


def train(state: dict) -> None:
    state["model"](torch.ones(1, 2)).square().sum().backward()
    state["optim"].step()
    state["optim"].zero_grad()
    state["plan"].step()


def has_function(plan: Callable[[Any], Any]) -> bool:
    """Whether torch itself puts a function into the schedule's state, as torch 2.6 does for SWALR: it is refused by name."""
    found = plan(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)).state_dict()
    return any(inspect.isfunction(value) for value in found.values())


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "plan"),
    [(sgd, plan) for plan in SCHEDULES.values()] + [(make, SCHEDULES["callable object"]) for make in OPTIMIZERS.values()],
    ids=[*SCHEDULES, *OPTIMIZERS],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_every_schedule_and_optimizer_goes_on(make, plan):
    """What it holds is the same, and so are rates and weights after two more steps."""
    if has_function(plan):
        pytest.skip("this torch keeps a function in the state of the schedule, which is refused by name")
    live, twin = training(make, plan, 3), training(make, plan, 1)
    restore(save(live), twin)
    assert held(twin) == held(live)
    for _ in range(2):
        train(live)
        train(twin)
    assert held(twin) == held(live)


def test_sparse_adam_goes_on():
    """Its moments are dense, of an embedding whose gradients are sparse."""

    def make(seed: int) -> dict:
        torch.manual_seed(seed)
        module = nn.Embedding(4, 2, sparse=True)
        return {"model": module, "optim": torch.optim.SparseAdam(module.parameters())}

    def step(state: dict) -> None:
        state["model"](torch.tensor([1, 2])).sum().backward()
        state["optim"].step()
        state["optim"].zero_grad()

    live, twin = make(1), make(2)
    step(live)
    restore(save(live), twin)
    step(live)
    step(twin)
    assert held(twin) == held(live)


GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "python": (random.Random, random.Random.getstate, random.Random.setstate),
    "RandomState": (
        np.random.RandomState,
        lambda g: g.get_state(legacy=False),
        lambda g, state: g.set_state(state),
    ),
    **{
        kind.__name__: (
            lambda n, kind=kind: np.random.Generator(kind(n)),  # type: ignore[misc]
            lambda g: g.bit_generator.state,
            lambda g, state: setattr(g.bit_generator, "state", state),
        )
        for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    },
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_go_on_by_the_line_that_their_refusal_gives(kind):
    """The object itself is refused with the line to write; by that line it draws what the other one draws."""
    make, get, put = GENERATORS[kind]
    with pytest.raises(InvalidRequest, match=r"^g: ") as refusal:
        save({"g": make(1)})
    assert "before each save" in refusal.value.hint and "after the restore" in refusal.value.hint
    one, two = make(1), make(2)
    draw = {"python": lambda g: g.random()}.get(kind, lambda g: g.normal(size=3))
    draw(one)
    state = {"g": get(two)}
    restore(save({"g": get(one)}), state)
    put(two, state["g"])
    assert np.array_equal(draw(one), draw(two))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler([1, 2]),
        lambda: DistributedSampler([1, 2], 2, 0),  # type: ignore[arg-type, var-annotated]
        lambda: TensorDataset(torch.ones(2)),
        lambda: iter([1]),
        lambda: io.BytesIO(),
        threading.Lock,
    ],
)
def test_objects_without_a_state_are_refused(make):
    """With what an object must have to be saved."""
    with pytest.raises(InvalidRequest, match=r"^thing: ") as refusal:
        save({"thing": make()})
    assert "state_dict() and load_state_dict()" in refusal.value.hint


def test_one_memory_in_two_entries_comes_back():
    """Views of one base, and a weight that a module and a mapping both have, are stored under both names."""

    def make(n: int) -> dict:
        base, module = torch.arange(6.0) + n, made(lambda: nn.Linear(2, 2), n)
        return {"a": base[:4], "b": {"x": base[2:], "n": n}, "model": module, "ema": {"w": module.weight.detach()}}

    live = make(2)
    restore(save(make(1)), live)
    assert held(live) == held(make(1)) and live["ema"]["w"].data_ptr() == live["model"].weight.data_ptr()
    assert live["a"][2:].data_ptr() == live["b"]["x"].data_ptr()


def test_one_memory_for_what_was_saved_as_two_is_refused():
    """Modules that share a weight here, and had one each when they were saved: refused by name, before anything changes.
    Where that is excused: the first one's bytes, and a note.
    """

    def make(n: int, shared: bool) -> dict:
        actor, critic = made(lambda: nn.Linear(2, 2), n), made(lambda: nn.Linear(2, 2), n + 5)
        if shared:
            critic.weight = actor.weight
        return {"actor": actor, "critic": critic, "things": {"w": actor.weight, "n": n}}

    live, saved = make(3, shared=True), make(1, shared=False)
    before = held(live)
    with pytest.raises(StateMismatch, match="critic/weight is actor/weight here"):
        restore(save(saved), live)
    assert held(live) == before
    done = restore(save(saved), live, strict=False)
    assert torch.equal(live["actor"].weight, saved["actor"].weight) and torch.equal(
        live["critic"].bias, saved["critic"].bias
    )
    assert [note for note in done.notes if "critic/weight is actor/weight here" in note] == done.notes
    again = make(4, shared=True)
    assert not restore(save(live), again).notes and held(again)[:3] == held(live)[:3]


class Tracker:
    """Random streams whose states contain themselves."""

    def __init__(self, states: Any) -> None:
        self.states = states

    def get_states(self) -> Any:
        return self.states

    def set_states(self, states: Any) -> None:
        self.states = states


def cycle(holder: Any) -> Any:
    """A list, dict or module that contains itself."""
    if isinstance(holder, dict):
        holder["again"] = holder
    else:
        holder.append(holder)
    return holder


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"it": cycle([])},
        lambda: {"it": cycle({})},
        lambda: {"it": (cycle([1, 2]),)},
        lambda: {"it": {"nested": [cycle({})]}},
        lambda: {"it": Holding(cycle({}))},
        lambda: {"it": Tracker(cycle({}))},
        lambda: {"it": cycle(nn.ModuleList([nn.Linear(1, 1)]))},
        lambda: {"it": cycle(nn.Sequential(nn.Linear(1, 1)))},
    ],
)
def test_what_contains_itself_is_refused_by_its_path(make: Callable[[], Any]) -> None:
    """Never a RecursionError: the path says where the cycle is closed."""
    with pytest.raises(CheckpointError) as refusal:
        save(make())
    assert refusal.value.detail.startswith("it")
    assert "itself" in refusal.value.detail or "nested" in refusal.value.detail

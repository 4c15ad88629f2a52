"""Compact checkpoints of other optimizers than Adam: what is no moment is stored exactly, errors are those that are stated,
and training resumes from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats.rest.retention import RetentionPolicy
from tests.daemons import RunningDaemon, running, wait_until

WARM = 12  # steps before the first save
SHAPE = (64, 128)


class Lion(torch.optim.Optimizer):
    """One momentum, of whose sum with the gradient the sign alone counts."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                first, second = group["betas"]
                parameter -= group["lr"] * torch.lerp(parameter.grad, momentum, first).sign()
                momentum.lerp_(parameter.grad, 1 - second)


class Odd(torch.optim.Optimizer):
    """State under the names of Adam's that is none of Adam's: integers, halves, single numbers, None, and factors."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        chance = torch.Generator().manual_seed(7)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["exp_avg"] = torch.randint(-(2**40), 2**40, parameter.shape, generator=chance)
            state["exp_avg_sq"] = torch.rand(parameter.shape, generator=chance).to(torch.bfloat16)
            state["momentum_buffer"] = None
            state["max_exp_avg_sq"] = -torch.rand(parameter.shape, generator=chance)
            state["square_avg"] = torch.rand((), generator=chance)
            state["exp_avg_sq_row"] = torch.rand((*parameter.shape[:1], 4), generator=chance)
            state["exp_avg_sq_col"] = torch.rand((*parameter.shape[1:], 4), generator=chance)
            parameter -= 1e-3 * parameter.grad


class Negative(torch.optim.SGD):
    """One with a state that has the name of a second moment, and values below zero."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["square_avg"] = -parameter.grad.abs()


MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "lion": Lion,
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9),
    "centered": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
    "negative": Negative,
    "odd": Odd,
}
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    MAKES["muon"] = lambda params: torch.optim.Muon(params, lr=1e-2)
# Of each optimizer's states, those that a rule codes.
CODED: dict[str, dict[str, dict[str, str]]] = {
    **{name: {"int8": {}} for name in ("adafactor", "lion", "muon", "sgd", "centered", "negative")},
    "rmsprop": {
        "bf16": {"square_avg": "bf16", "momentum_buffer": "bf16"},
        "int8": {"square_avg": "int8-log", "momentum_buffer": "int8"},
    },
    "odd": {"bf16": {}, "int8": {}},
}
RUNS = [(name, rule) for name, rules in CODED.items() for rule in rules]
HERE = [(name, rule) for name, rule in RUNS if name in MAKES]
REFUSED = "negative-int8@1 is not compacted: negative-int8@1 cannot be compacted: it has values below zero"


class Trainer:
    """Two matrices of low rank gradients, as those of a few tokens."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0], bias=False), nn.Linear(SHAPE[0], 32, bias=False))
        self.optimizer = MAKES[name](self.model.parameters())

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optimizer}

    def train(self, steps: range) -> None:
        for step in steps:
            chance = torch.Generator().manual_seed(step)
            given = torch.randn(16, SHAPE[1], generator=chance)
            wanted = torch.randn(16, 32, generator=chance)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(torch.tanh(self.model(given)), wanted).backward()
            self.optimizer.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([one.detach().ravel() for one in self.model.parameters()]).clone()

    def held(self) -> dict[str, Any]:
        """The optimizer's state, by the names that a checkpoint has for it."""
        named = dict(self.model.named_parameters())
        return {f"{n}/{key}": value for n, p in named.items() for key, value in self.optimizer.state[p].items()}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One with a run for each optimizer and rule, whose first step is compact if anything of it can be."""
    with running(tmp_path_factory.mktemp("optimizers") / "root", listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        for name in MAKES:
            trainer = Trainer(name)
            trainer.train(range(WARM))
            for rule in CODED[name]:
                with Checkpointer(f"{name}-{rule}", trainer.state, at=daemon.socket) as checkpointer:
                    for step in (1, 2):
                        checkpointer.save(step, wait="durable")
        for name, rule in HERE:
            retention.set_policy(api, f"{name}-{rule}", RetentionPolicy(optim=rule, optim_full=1), "*")
        for name, rule in HERE:
            run, wanted = f"{name}-{rule}", [False, bool(CODED[name][rule])]
            wait_until(lambda run=run, wanted=wanted: [c.compacted is not None for c in api.checkpoints(run)] == wanted)
        wait_until(lambda: REFUSED in daemon.log.read_text())
        yield daemon


@pytest.mark.parametrize(("name", "rule"), RUNS)
def test_states_of_other_optimizers(daemon: RunningDaemon, name: str, rule: str) -> None:
    """What is no moment is exact, and what is one is as far off as the manifest says. Training goes on nearly as it would
    have.
    """
    if name not in MAKES:
        pytest.skip("this torch has no torch.optim.Muon: torch 2.9 and newer do")
    saved, restored = Trainer(name), Trainer(name)
    saved.train(range(WARM))
    with Checkpointer(f"{name}-{rule}", restored.state, at=daemon.socket) as checkpointer:
        assert checkpointer.restore(1) == 1
    with holdfast.open(f"{name}-{rule}@1", root=daemon.root) as checkpoint:
        small = checkpoint.manifest.compacted
        told = {} if small is None else small.tensors.get("optim", {})
        exact = {} if small is None else small.exact.get("optim", {})
    found, expected = restored.held(), saved.held()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if not isinstance(value, torch.Tensor):
            assert found[key] == value and type(found[key]) is type(value), key
            continue
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        one = told.get(key)
        if one is None:
            assert torch.equal(found[key], value), (key, exact)
            continue
        apart = float((found[key].double() - value.double()).norm() / value.double().norm())
        assert apart == pytest.approx(one.error, rel=1e-6) and apart < 0.05, key
        assert not ((found[key].sign() * value.sign()) < 0).any(), key
    assert {key.rpartition("/")[2]: one.coding for key, one in told.items()} == CODED[name][rule]
    assert torch.equal(restored.weights(), saved.weights())
    before, updates = saved.weights(), []
    for trainer in (saved, restored):
        trainer.train(range(WARM, WARM + 1))
        updates.append(trainer.weights() - before)
    assert float((updates[1] - updates[0]).norm() / updates[0].norm()) <= (0.02 if told else 0.0)

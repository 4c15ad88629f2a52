"""Every optimizer of torch, with every option, steps once from a compact checkpoint: nothing is NaN, and what holds between
the states of a parameter still holds.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats.rest.retention import RetentionPolicy
from tests.daemons import RunningDaemon, running, wait_until

# The most by which updates may differ, of their norm, and one of them, of the largest.
RULES = {"bf16": (0.01, 0.05), "int8": (0.05, 3.0)}
WARM = 32  # steps before the first save: a centered variance is far below its square by then
SHAPE = (24, 40)
_SWITCHES = ("amsgrad", "centered", "nesterov", "maximize", "foreach", "fused", "differentiable", "decoupled_weight_decay")
_BOTH = ({"amsgrad": True, "maximize": True}, {"centered": True, "momentum": 0.9}, {"centered": True, "foreach": True})


def variants() -> dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    """Every optimizer of this torch with each option alone, and with options that share a state."""
    found: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {}
    for name, kind in vars(torch.optim).items():
        if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
            continue
        known = inspect.signature(kind).parameters
        faster = {"alpha": 0.75} if name == "RMSprop" else {}
        chosen: list[dict[str, Any]] = [{}, {"momentum": 0.9}, *({switch: True} for switch in _SWITCHES), *_BOTH]
        for options in chosen:
            if options.keys() <= known.keys():
                more = {"momentum": 0.9} if "nesterov" in options else {}
                found[" ".join([name, *options])] = kind, {**faster, **more, **options}
    return found


VARIANTS = variants()


class Trainer:
    """One weight for each variant. Its gradients hardly vary, as those of a large batch."""

    def __init__(self) -> None:
        self.chance = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterDict()
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.means = torch.randn(len(VARIANTS), *SHAPE, generator=self.chance)
        for at, (name, (kind, options)) in enumerate(VARIANTS.items()):
            # Without a gradient of autograd, a differentiable optimizer can step it.
            weight = nn.Parameter(1e-3 * torch.randn(SHAPE, generator=self.chance), requires_grad=False)
            self.weights[str(at)] = weight
            self.optimizers[name] = kind([weight], lr=1e-3, **options)  # type: ignore[call-arg]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.weights, "optim": self.optimizers}

    def step(self) -> None:
        for mean, (name, optimizer), weight in zip(self.means, self.optimizers.items(), self.weights.values(), strict=True):
            grad = mean * (1 + 0.02 * torch.randn(SHAPE, generator=self.chance))
            weight.grad = grad.to_sparse() if name.startswith("SparseAdam") else grad
            optimizer.step((lambda: torch.tensor(1.0)) if name.startswith("LBFGS") else None)

    def go_on_as(self, other: Trainer) -> None:
        self.chance.set_state(other.chance.get_state())


def broken(state: dict[str, Any]) -> list[str]:
    """What does not hold between the states that an optimizer keeps of one parameter."""
    wrong = [key for key, value in state.items() if isinstance(value, torch.Tensor) and not value.isfinite().all()]
    seconds = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "acc_delta")
    wrong += [f"{key} < 0" for key in seconds if key in state and (state[key] < 0).any()]
    if "max_exp_avg_sq" in state and (state["max_exp_avg_sq"] < state["exp_avg_sq"]).any():
        wrong.append("max_exp_avg_sq < exp_avg_sq")
    if "grad_avg" in state and (state["square_avg"] < state["grad_avg"].square()).any():
        wrong.append("square_avg < grad_avg squared")
    for first, second in (("exp_avg", "exp_avg_sq"), ("exp_avg", "exp_inf"), ("momentum_buffer", "square_avg")):
        if first in state and second in state and ((state[first] != 0) & (state[second] == 0)).any():
            wrong.append(f"{first} without {second}")
    return wrong


@pytest.fixture(scope="module")
def saved() -> Trainer:
    trainer = Trainer()
    for _ in range(WARM):
        trainer.step()
    return trainer


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, saved: Trainer) -> Iterator[RunningDaemon]:
    """One with a run for each rule, whose first step is compact."""
    with running(tmp_path_factory.mktemp("invariants") / "root", listen="127.0.0.1:0") as daemon, Api(daemon.url) as api:
        for rule in RULES:
            with Checkpointer(rule, saved.state, at=daemon.socket) as checkpointer:
                for step in (1, 2):
                    checkpointer.save(step, wait="durable")
            retention.set_policy(api, rule, RetentionPolicy(optim=rule, optim_full=1), "*")  # type: ignore[arg-type]
        for rule in RULES:
            wait_until(lambda rule=rule: [c.compacted is not None for c in api.checkpoints(rule)] == [False, True])
        yield daemon


@pytest.mark.parametrize("rule", RULES)
def test_every_optimizer_steps_from_a_compact_checkpoint(daemon: RunningDaemon, saved: Trainer, rule: str) -> None:
    """As it would have stepped from the exact one, but for the error that is stated."""
    exact, compact = Trainer(), Trainer()
    for trainer, step in ((exact, 2), (compact, 1)):
        with Checkpointer(rule, trainer.state, at=daemon.socket) as checkpointer:
            assert checkpointer.restore(step) == step
        trainer.go_on_as(saved)
    told, differing, (all_apart, one_apart) = {}, 0, RULES[rule]
    for at, (name, optimizer) in enumerate(compact.optimizers.items()):
        kept = optimizer.state[compact.weights[str(at)]]
        told[name] = broken(kept)
        twin = exact.optimizers[name].state[exact.weights[str(at)]]
        differing += any(not torch.equal(value, twin[key]) for key, value in kept.items() if isinstance(value, torch.Tensor))
    assert not {name: wrong for name, wrong in told.items() if wrong}
    assert differing > 20  # it is a compact checkpoint
    before = {key: weight.clone() for key, weight in exact.weights.items()}
    exact.step()
    compact.step()
    for at, (name, optimizer) in enumerate(compact.optimizers.items()):
        key = str(at)
        assert not broken(optimizer.state[compact.weights[key]]), name
        wanted = exact.weights[key] - before[key]
        apart = compact.weights[key] - exact.weights[key]
        assert wanted.isfinite().all() and float(apart.norm()) <= all_apart * float(wanted.norm()), name
        assert float(apart.abs().max()) <= one_apart * float(wanted.abs().max()), name

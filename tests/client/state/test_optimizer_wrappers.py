"""Optimizers inside what frameworks wrap around them: stored whole under one key, waited for, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.stage.background_safe import Judge, StepHooks, expected_growth
from holdfast.state import optimizer_wrappers
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import InvalidRequest
from tests.client import frameworks
from tests.client.checkpoint_in_memory import restore, save


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def step(module: nn.Module, optimizer: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        module.zero_grad()
        module(torch.rand(5, 3, generator=generator)).square().sum().backward()
        for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            each.step()


def parts(module: nn.Module) -> list[Any]:
    return [adamw(part.parameters()) for part in module]


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "accelerate": lambda m: frameworks.Accelerated(adamw(m.parameters())),
    "accelerate twice": lambda m: frameworks.Accelerated(frameworks.Accelerated(adamw(m.parameters()))),
    "titan": lambda m: frameworks.Container(list(m), adamw),
    "megatron": lambda m: frameworks.Chained(parts(m)),
    "megatron in accelerate": lambda m: frameworks.Chained([frameworks.Accelerated(inner) for inner in parts(m)]),
    "a list": parts,
    "a tuple": lambda m: tuple(parts(m)),
    "with a helper": lambda m: frameworks.Helped(m.parameters()),
}


@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "running"])
def test_training_goes_on_bit_for_bit_through_a_wrapper(kind: str, fresh: bool) -> None:
    """What the innermost optimizers keep is all stored, under the wrapper's key, and all comes back."""
    module = model()
    optimizer = WRAPPERS[kind](module)
    step(module, optimizer, 2)
    state = {"model": module, "optim": optimizer}
    checkpoint = save(state)
    inner = optimizer_wrappers.innermost(state)
    kept = sum(isinstance(value, torch.Tensor) for each in inner for held in each.state.values() for value in held.values())
    assert kept and len(checkpoint.specs["optim"]) == kept
    step(module, optimizer, 3)

    other = model(1)
    resumed = WRAPPERS[kind](other)
    if not fresh:
        step(other, resumed, 1)
    restoration = restore(checkpoint, {"model": other, "optim": resumed})
    assert not restoration.missing and not restoration.unexpected
    step(other, resumed, 3)
    assert all(map(torch.equal, other.parameters(), module.parameters()))


@pytest.mark.parametrize("saved", WRAPPERS)
def test_one_wrapper_restores_from_another(saved: str) -> None:
    """Parameters have names and the key one document, so it does not matter how optimizers were wrapped."""
    module, other = model(), model(1)
    optimizer, plain = WRAPPERS[saved](module), frameworks.Container([other], adamw)
    step(module, optimizer, 2)
    restore(save({"model": module, "optim": optimizer}), {"model": other, "optim": plain}, strict=False)
    expected = {
        id(parameter): held
        for inner in optimizer_wrappers.innermost({"optim": optimizer})
        for parameter, held in inner.state.items()
    }
    for mine, theirs in zip(other.parameters(), module.parameters(), strict=True):
        for key, value in expected[id(theirs)].items():
            assert torch.equal(plain.optimizers[0].state[mine][key], value)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_steps_inside_are_waited_for(kind: str) -> None:
    """Hooks, the copy behind the training's back and the estimate of what a first step adds know the same optimizers."""
    module = model()
    optimizer = WRAPPERS[kind](module)
    state = {"model": module, "optim": optimizer}
    growth = expected_growth(state)
    assert growth.tensors == 3 * len(list(module.parameters()))
    stepped: set[object] = set()
    hooks = StepHooks(state, lambda inner, *_: stepped.add(inner))
    hooks.renew()
    step(module, optimizer, 1)
    assert stepped == set(optimizer_wrappers.innermost(state))
    leaf = next(leaf for leaf in TrainState(state, 0, 1).snapshot().leaves if leaf.group == "optim")
    assert Judge(state, fenced=False)(leaf, leaf.pieces[0])
    hooks.remove()
    stepped.clear()
    step(module, optimizer, 1)
    assert not stepped


def test_an_optimizer_that_comes_later_is_waited_for_too() -> None:
    """Hooks are renewed: another optimizer under the key, or one more in a list, is hooked once."""
    module = model()
    state: dict[str, Any] = {"model": module, "optim": parts(module)[:1]}
    called: list[object] = []
    hooks = StepHooks(state, lambda *_: called.append(1))
    hooks.renew()
    state["optim"] = [*state["optim"], *parts(module)[1:]]
    hooks.renew()
    hooks.renew()
    step(module, state["optim"], 1)
    assert len(called) == 2


def test_full_precision_copies_inside_a_wrapper_are_handed_over_by_name() -> None:
    """Megatron's copies are no parameters of the model: refused until the state names them as masters, stored then."""
    module = model().to(torch.bfloat16)
    optimizer = frameworks.Chained([frameworks.Mixed(adamw(part.parameters())) for part in module])
    with pytest.raises(InvalidRequest, match="belongs to no module in the state") as refused:
        TrainState({"model": module, "optim": optimizer}, 0, 1)
    assert "'master'" in refused.value.hint

    def state_of(module: nn.Module, optimizer: Any) -> dict[str, Any]:
        masters = {name: parameter.main_param for name, parameter in module.named_parameters()}
        return {"model": module, "optim": optimizer, "master": masters}

    def train(module: nn.Module, optimizer: Any) -> None:
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()

    train(module, optimizer)
    checkpoint = save(state_of(module, optimizer))
    assert {spec[0] for spec in checkpoint.specs["master"].values()} == {"F32"}
    other = model(1).to(torch.bfloat16)
    resumed = frameworks.Chained([frameworks.Mixed(adamw(part.parameters())) for part in other])
    restore(checkpoint, state_of(other, resumed))
    train(module, optimizer)
    train(other, resumed)
    for mine, theirs in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(mine, theirs) and torch.equal(mine.main_param, theirs.main_param)


def scaled(module: nn.Module) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    return frameworks.Accelerated(adamw(module.parameters()), scaler)


def slow(module: nn.Module) -> Any:
    optimizer = frameworks.Lookahead(adamw(module.parameters()))
    step(module, optimizer, 1)
    return optimizer


def with_copies(module: nn.Module) -> Any:
    optimizer = frameworks.Chained(parts(module))
    optimizer.averages = [parameter.detach().clone() for parameter in module.parameters()]  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (scaled, "optim: the Accelerated around the optimizer has scaler, a GradScaler whose state would not be saved"),
        (slow, "optim: the Lookahead around the optimizer has its own state"),
        (with_copies, "optim: the Chained around the optimizer has its own tensors in averages"),
        (frameworks.Homemade, "optim: Homemade has param_groups, but is not a torch optimizer and does not wrap one"),
        (lambda module: [frameworks.Homemade(module)], "optim: list has param_groups"),
    ],
)
def test_what_would_be_lost_with_a_wrapper_is_refused(make: Callable[[nn.Module], Any], message: str) -> None:
    """A wrapper with state of its own, and what looks like an optimizer but is none, are refused at once, with a way out."""
    module = model()
    with pytest.raises(InvalidRequest, match=message) as refused:
        TrainState({"model": module, "optim": make(module)}, 0, 1)
    assert "pass the" in refused.value.hint


def test_what_a_wrapper_holds_may_have_an_entry_of_its_own() -> None:
    """A scaler that the state has as well, or that is switched off, is not lost."""
    module = model()
    optimizer = scaled(module)
    TrainState({"model": module, "optim": optimizer, "scaler": optimizer.scaler}, 0, 1).snapshot()
    optimizer.scaler = torch.amp.GradScaler("cpu", enabled=False)
    TrainState({"model": module, "optim": optimizer}, 0, 1).snapshot()


def test_an_optimizer_whose_step_cannot_be_hooked_is_refused() -> None:
    """An optimizer that never called its base's __init__ has no hooks: its steps could not be waited for."""

    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            self.param_groups, self.state = [{"params": list(parameters)}], {}  # type: ignore[assignment]

    module = model()
    with pytest.raises(InvalidRequest, match=r"Bare\.step\(\) has no hooks"):
        StepHooks({"model": module, "optim": Bare(module.parameters())}, print).renew()


def test_state_of_what_is_in_no_group_is_refused() -> None:
    """State under a tensor that no param_group has would be left out: it is refused by the tensor's name, or its shape."""
    module = model()
    optimizer = adamw(module.parameters())
    step(module, optimizer, 1)
    state = TrainState({"model": module, "optim": optimizer}, 0, 1)
    state.snapshot()
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    with pytest.raises(InvalidRequest, match=r"keeps step, exp_avg, exp_avg_sq for 0\.weight"):
        state.snapshot()
    optimizer.state = {torch.ones(7): {"exp_avg": torch.ones(7)}}  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match=r"not in the state, of shape \[7\], which is in none of its param_groups"):
        state.snapshot()


def test_partitioned_parameters_are_refused() -> None:
    """DeepSpeed's ZeRO-3 leaves every parameter empty: refused by name, with its marks and, in a copied mapping, without."""
    module = model()
    optimizer = frameworks.Zero3(module)
    with pytest.raises(
        InvalidRequest, match=r"'0\.weight' is partitioned by DeepSpeed: its global shape is \[4, 3\]"
    ) as told:
        TrainState({"model": module, "optim": optimizer}, 0, 1)
    assert "deepspeed.attach" in told.value.hint
    with pytest.raises(InvalidRequest, match=r"all 4 tensors are empty, for example '0\.weight'"):
        TrainState({"model": module.state_dict()}, 0, 1)
    with pytest.raises(InvalidRequest, match="in none of its param_groups"):
        TrainState({"model": model(), "optim": optimizer}, 0, 1).snapshot()


def test_parts_of_tensor_parallelism_need_a_layout() -> None:
    """A parameter that Megatron marks as one rank's part is refused in a world of several, unless a layout is given."""
    module = model()
    for parameter in module.parameters():
        parameter.tensor_model_parallel = parameter.dim() > 1  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match=r"'0\.weight' is marked tensor_model_parallel") as refused:
        TrainState({"model": module}, 0, 2)
    assert "layout=" in refused.value.hint
    TrainState({"model": module}, 0, 1).snapshot()  # of one rank it is the whole
    unmarked = copy.deepcopy(module)
    for parameter in unmarked.parameters():
        parameter.tensor_model_parallel = False  # type: ignore[attr-defined]
    TrainState({"model": unmarked}, 0, 2).snapshot()


class Counting(torch.optim.SGD):
    """Keeps a count of its own in what `state_dict()` returns."""

    def state_dict(self) -> dict:  # type: ignore[override]
        return {**super().state_dict(), "steps": 7}


@pytest.mark.parametrize("how", ["class", "hook"])
def test_what_state_dict_has_besides_is_refused(how: str) -> None:
    """A class or a hook that adds to state_dict() would lose what it adds: it is refused by that name."""
    model = torch.nn.Linear(2, 2)
    optimizer: torch.optim.Optimizer = Counting(model.parameters(), 0.1)
    if how == "hook":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.register_state_dict_post_hook(lambda _, made: {**made, "steps": 7})
    with pytest.raises(InvalidRequest, match="steps"):
        TrainState({"model": model, "optim": optimizer}, 0, 1)

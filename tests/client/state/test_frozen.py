"""Which tensors are expected to stay: parameters that nothing in the state trains. When in doubt, none."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast import Fragment, OptimizerShards
from holdfast.state.named import Named
from holdfast.state.train_state import TrainState

Made = dict[str, Any]


class Adapted(nn.Module):
    """A frozen base with a buffer, and an adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.adapter = nn.Linear(4, 2, bias=False)
        self.register_buffer("count", torch.zeros(2))


def frozen(state: Made, groups: Any = None) -> set[str]:
    """The paths of a save's frozen tensors."""
    return _frozen(TrainState(state, 0, 1), groups)


def _frozen(train: TrainState, groups: Any = None) -> set[str]:
    return {leaf.path for leaf in train.snapshot(groups).leaves if leaf.frozen}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


BASE = {"model/base.weight", "model/base.bias"}


@pytest.mark.parametrize("of", [nn.Module.parameters, lambda model: model.adapter.parameters()])
def test_a_base_that_no_gradient_reaches_is_frozen(of: Any) -> None:
    """Buffers and moments are not. An optimizer may be given all of a model's parameters, and steps the trained ones."""
    model = Adapted()
    state = {"model": model, "optim": torch.optim.AdamW(of(model)), "loose": torch.zeros(3)}
    assert frozen(state) == frozen(state, groups=("model",)) == BASE
    stepped(model, state["optim"])
    assert frozen(state) == BASE


def test_what_is_frozen_follows_the_state() -> None:
    """Between saves a part may be frozen or trained again, get a gradient or moments."""
    model = Adapted()
    train = TrainState({"model": model, "optim": torch.optim.AdamW(model.parameters())}, 0, 1)
    assert _frozen(train) == BASE
    model.base.requires_grad_(True)
    assert not _frozen(train)
    model.base.bias.requires_grad_(False)
    assert _frozen(train) == {"model/base.bias"}
    model.base.requires_grad_(False)
    assert _frozen(train) == BASE
    model.base.weight.grad = torch.ones(4, 4)  # set by hand: the optimizer steps it
    train.state["optim"].step()
    assert _frozen(train) == {"model/base.bias"}
    model.adapter.requires_grad_(False)
    assert _frozen(train) == {"model/base.bias", "model/adapter.weight"}


def test_other_leaves_stay_identical() -> None:
    """A save reuses what it knows of leaves that are the same as before."""
    model = Adapted()
    train = TrainState({"model": model}, 0, 1)
    before = {leaf.path: leaf for leaf in train.snapshot().leaves}
    model.base.bias.requires_grad_(True)
    after = {leaf.path: leaf for leaf in train.snapshot().leaves}
    assert {path for path in before if path.startswith("model/") and after[path] is not before[path]} == {"model/base.bias"}


def test_memory_that_is_trained_under_another_name_is_not_frozen() -> None:
    """Tied weights of which one is trained, a slice of a trained tensor, and a buffer that is a view."""
    model = Adapted()
    model.tied = nn.Parameter(model.adapter.weight.detach(), requires_grad=False)
    model.part = nn.Parameter(model.adapter.weight.detach()[1:], requires_grad=False)
    model.register_buffer("view", model.base.bias.detach()[2:])
    assert frozen({"model": model, "optim": torch.optim.SGD(model.adapter.parameters())}) == {"model/base.weight"}


def test_weights_that_another_tensor_replaces_are_not_frozen() -> None:
    """Weights without gradients, which a trainer copies from their masters after each step."""
    model = nn.Linear(4, 4).half().requires_grad_(False)
    masters = {name: nn.Parameter(value.float()) for name, value in model.state_dict().items()}
    assert not frozen({"model": model, "master": masters, "optim": torch.optim.SGD(masters.values())})
    whole = nn.Linear(4, 4)
    assert not frozen({"model": model, "full": whole, "optim": torch.optim.SGD(whole.parameters())})


@pytest.mark.parametrize("detached", [False, True])
def test_an_average_is_frozen_as_its_weight_is(detached: bool) -> None:
    """Also if no average requires a gradient; one without a weight of its name is not."""
    model = Adapted()
    average = AveragedModel(model)
    if detached:
        average.requires_grad_(False)
    state = {"model": model, "ema": average, "optim": torch.optim.SGD(model.adapter.parameters())}
    assert frozen(state) == {*BASE, "ema/base.weight", "ema/base.bias"}
    assert frozen({"model": nn.Linear(2, 2), "ema": average}) == set()


def test_a_teacher_is_frozen_and_plain_tensors_are_not() -> None:
    """Another module under its own key; a mapping of tensors may be changed in any way."""
    model = nn.Linear(4, 4)
    teacher = copy.deepcopy(model).requires_grad_(False)
    state = {
        "model": model,
        "teacher": teacher,
        "table": {"x": torch.zeros(3)},
        "optim": torch.optim.SGD(model.parameters()),
    }
    assert frozen(state) == {"teacher/weight", "teacher/bias"}
    assert frozen({"model": {"x": torch.zeros(3)}}) == set()


def test_names_and_fragments() -> None:
    """`Named` keeps the mark; a Fragment has that of the parameter of which it is a part."""
    model = Adapted()
    named = Named(
        model,
        rename=lambda name: f"x.{name}",
        shards=lambda name, value: Fragment(value, value.shape, offset=(0,) * value.dim(), held=value),
    )
    assert frozen({"model": named}) == {"model/x.base.weight", "model/x.base.bias"}


def test_what_a_framework_steps_by_name_is_not_frozen() -> None:
    """An engine may keep gradients elsewhere."""
    model = Adapted()
    shards = OptimizerShards(groups=lambda: [{"params": ["base.weight"]}], state=dict, install=lambda groups, values: None)
    assert frozen({"model": model, "optim": shards}) == {"model/base.bias"}


def test_quantised_bases_and_inference_tensors() -> None:
    """Integers cannot require gradients, and tensors made for inference only do not."""
    model = Adapted()
    model.codes = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    with torch.inference_mode():
        model.made = nn.Parameter(torch.ones(3), requires_grad=False)
    assert frozen({"model": model}) == {*BASE, "model/codes", "model/made"}

"""The shortcut of a save: it sees every change of the live state that a new walk through it would see."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.state.train_state import TrainState
from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import CheckpointError
from tests.client.frameworks import Accelerated


class Block(nn.Module):
    """Parameters, buffers of both kinds, and a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scratch", torch.zeros(6), persistent=False)


class WithoutMean(Block):
    """The same, but its state_dict has no mean."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "mean"]


class Custom(nn.Module):
    """A module whose state_dict holds what nobody can see coming."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.more = torch.zeros(2)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "more"] = self.more


def make() -> dict[str, Any]:
    """A state with one of everything, its optimizer stepped once."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optim": optim, "ema": {"a": torch.ones(4), "b": torch.ones(2, 3)}}
    state |= {"loose": {"a": torch.ones(5)}, "one": torch.ones(2), "part": Fragment(torch.ones(2), (4,), offset=(2,))}
    state["boxed"] = Fragment(torch.ones(1), (2, 4), offset=(0, 0), box=(2, 2), flat=(2, 3))
    state["parts"] = [Fragment(torch.ones(2), (8,), offset=(at,)) for at in (2, 0)]
    step(state)
    critic, others = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    wrapped = Accelerated(torch.optim.AdamW(critic.parameters(), lr=0.1))
    several = [torch.optim.AdamW(module.parameters()) for module in others]
    for parameter in (*critic.parameters(), *others.parameters()):
        parameter.grad = torch.ones_like(parameter)
    for optimizer in (wrapped, *several):
        optimizer.step()
    state |= {"critic": critic, "wrapped": wrapped, "others": others, "several": several}
    return state | {"wave": {"a": torch.ones(2) * 1j}, "epoch": 1, "nested": {"x": [1, torch.ones(2)]}}


def step(state: dict[str, Any]) -> None:
    for group in state["optim"].param_groups:
        for parameter in group["params"]:
            parameter.grad = None  # its shape may have changed
            parameter.grad = torch.ones_like(parameter)
    state["optim"].step()


def described(state: TrainState) -> tuple[Any, ...]:
    """What a snapshot says, with where every byte lies; random streams are copies, new at each. What a state remembers of
    learning rates is left out: one that is new has seen no other.
    """
    snapshot = state.snapshot()
    leaves = {
        leaf.key: (
            leaf.dtype,
            leaf.shape,
            leaf.placement,
            [(p.box, p.tensor.data_ptr(), p.tensor.stride(), p.tensor.dtype) for p in leaf.pieces],
        )
        for leaf in snapshot.leaves
        if "rng" not in leaf.name
    }
    values = {
        (group, key): re.sub(r'"began":{[^}]*},|,"began"(?=])', "", text)
        for group, texts in snapshot.values.items()
        for key, text in texts.items()
        if key != "rng"
    }
    return snapshot.groups, leaves, values, snapshot.aliases, snapshot.mesh


def told(state: Callable[[], TrainState]) -> Any:
    """What a snapshot says, or with what it is refused."""
    try:
        return described(state())
    except CheckpointError as error:
        return type(error), error.detail


def parameter_of(state: dict[str, Any]) -> nn.Parameter:
    return state["model"][0].inner.weight


def new_memory(state: dict[str, Any]) -> None:
    parameter_of(state).data = parameter_of(state).data.clone()


def transposed(state: dict[str, Any]) -> None:
    parameter_of(state).data = parameter_of(state).data.t()


def shorter(state: dict[str, Any]) -> None:
    parameter_of(state).data = parameter_of(state).data[:3]


def other_dtype(state: dict[str, Any]) -> None:
    state["ema"]["a"].data = state["ema"]["a"].data.view(torch.int32)


def replaced(state: dict[str, Any]) -> None:
    state["model"][1].inner = nn.Linear(6, 6)
    state["optim"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)


def added_adapter(state: dict[str, Any]) -> None:
    state["model"].add_module("adapter", nn.Linear(2, 2))


def tied(state: dict[str, Any]) -> None:
    state["model"][0].mean = state["model"][1].mean


def buffer_of_none(state: dict[str, Any]) -> None:
    state["model"][0].mean = None


def persistent_now(state: dict[str, Any]) -> None:
    state["model"][0]._non_persistent_buffers_set.clear()


def other_hyper(state: dict[str, Any]) -> None:
    state["optim"].param_groups[0]["lr"] = 0.05


def hyper_of_another_type(state: dict[str, Any]) -> None:
    state["optim"].param_groups[0]["amsgrad"] = 0


def tensor_rate(state: dict[str, Any]) -> None:
    state["optim"].param_groups[0]["lr"] = torch.tensor(0.1)


def other_optimizer_state(state: dict[str, Any]) -> None:
    state["optim"].state[parameter_of(state)]["exp_avg"] = torch.ones(6, 6)


def plain_optimizer_state(state: dict[str, Any]) -> None:
    state["optim"].state[parameter_of(state)]["seen"] = 3


def mutable_optimizer_state(state: dict[str, Any]) -> None:
    state["optim"].state[parameter_of(state)].setdefault("history", []).append(1)


def other_group(state: dict[str, Any]) -> None:
    state["extra_parameters"] = {"z": nn.Parameter(torch.ones(2))}


def mapping_grew(state: dict[str, Any]) -> None:
    state["loose"]["b"] = torch.ones(1)


def mapping_renamed(state: dict[str, Any]) -> None:
    state["ema"]["c"] = state["ema"].pop("a")


def other_tensor(state: dict[str, Any]) -> None:
    state["one"] = torch.ones(2)


def tensor_became_value(state: dict[str, Any]) -> None:
    state["one"] = 7


def value_became_tensor(state: dict[str, Any]) -> None:
    state["epoch"] = torch.ones(3)


def other_value(state: dict[str, Any]) -> None:
    state["epoch"] += 1
    state["nested"]["x"].append(5)


def other_fragment(state: dict[str, Any]) -> None:
    state["part"] = Fragment(torch.ones(2), (4,), offset=(0,))


def entry_gone(state: dict[str, Any]) -> None:
    del state["loose"]


def hooked(state: dict[str, Any]) -> None:
    state["model"][0].register_state_dict_post_hook(drop_mean)


def drop_mean(module: nn.Module, found: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    del found[prefix + "mean"]


def loaded(state: dict[str, Any]) -> None:
    """What `load_state_dict` does: another `state`, other groups, other tensors."""
    state["optim"].load_state_dict(copy.deepcopy(state["optim"].state_dict()))


def other_state_object(state: dict[str, Any]) -> None:
    kept = {parameter: {"seen": torch.ones(1)} for parameter in state["model"].parameters()}
    state["optim"].state = defaultdict(dict, kept)


def other_groups_object(state: dict[str, Any]) -> None:
    state["optim"].param_groups = [{**group, "lr": 0.5} for group in state["optim"].param_groups]


def other_list_of_parameters(state: dict[str, Any]) -> None:
    group = state["optim"].param_groups[0]
    group["params"] = list(reversed(group["params"]))


def added_group(state: dict[str, Any]) -> None:
    state["model"].add_module("adapter", nn.Linear(2, 2))
    state["optim"].add_param_group({"params": list(state["model"].adapter.parameters()), "lr": 0.7})


def optimizer_in_a_wrapper(state: dict[str, Any]) -> None:
    state["wrapped"].optimizer = torch.optim.SGD(state["critic"].parameters(), lr=0.3, momentum=0.9)
    for parameter in state["critic"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["wrapped"].optimizer.step()


def loaded_in_a_wrapper(state: dict[str, Any]) -> None:
    state["wrapped"].load_state_dict(copy.deepcopy(state["wrapped"].state_dict()))


def fewer_optimizers(state: dict[str, Any]) -> None:
    state["several"].pop()


def tensor_of_a_fragment(state: dict[str, Any]) -> None:
    state["part"].tensor = torch.full((2,), 7.0)


def place_of_a_fragment(state: dict[str, Any]) -> None:
    state["part"].offset = (0,)


def box_of_a_fragment(state: dict[str, Any]) -> None:
    state["boxed"].box = (1, 4)


def part_added(state: dict[str, Any]) -> None:
    state["parts"].append(Fragment(torch.full((3,), 5.0), (8,), offset=(4,)))


def parts_turned(state: dict[str, Any]) -> None:
    state["parts"].reverse()


def tensor_of_a_part(state: dict[str, Any]) -> None:
    state["parts"][1].tensor = torch.full((2,), 6.0)


def part_that_is_none(state: dict[str, Any]) -> None:
    state["parts"].append(None)


def registered_again(state: dict[str, Any]) -> None:
    state["model"][0].register_buffer("mean", torch.full((6,), 3.0))


def parameter_replaced(state: dict[str, Any]) -> None:
    old = parameter_of(state)
    new = state["model"][0].inner.weight = nn.Parameter(torch.full((6, 6), 2.0))
    params = state["optim"].param_groups[0]["params"]
    params[[p is old for p in params].index(True)] = new
    state["optim"].state[new] = state["optim"].state.pop(old)


def containers_of_a_module(state: dict[str, Any]) -> None:
    state["model"][0]._buffers = {"mean": torch.full((6,), 4.0)}


def swapped(state: dict[str, Any]) -> None:
    torch.utils.swap_tensors(state["ema"]["a"], torch.full((5,), 8.0))


def conjugated(state: dict[str, Any]) -> None:
    state["wave"]["a"].data = state["wave"]["a"].data.conj()


def own_state_dict(state: dict[str, Any]) -> None:
    state["model"][0].state_dict = lambda *_, **__: {}


def other_class(state: dict[str, Any]) -> None:
    state["model"][0].__class__ = WithoutMean


CHANGES = [
    loaded,
    other_state_object,
    other_groups_object,
    other_list_of_parameters,
    added_group,
    optimizer_in_a_wrapper,
    loaded_in_a_wrapper,
    fewer_optimizers,
    tensor_of_a_fragment,
    place_of_a_fragment,
    box_of_a_fragment,
    part_added,
    parts_turned,
    tensor_of_a_part,
    part_that_is_none,
    registered_again,
    parameter_replaced,
    containers_of_a_module,
    swapped,
    conjugated,
    own_state_dict,
    other_class,
    new_memory,
    transposed,
    shorter,
    other_dtype,
    replaced,
    added_adapter,
    tied,
    buffer_of_none,
    persistent_now,
    other_hyper,
    hyper_of_another_type,
    tensor_rate,
    other_optimizer_state,
    plain_optimizer_state,
    mutable_optimizer_state,
    other_group,
    mapping_grew,
    mapping_renamed,
    other_tensor,
    tensor_became_value,
    value_became_tensor,
    other_value,
    other_fragment,
    entry_gone,
    hooked,
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: Callable[[dict[str, Any]], None]) -> None:
    """After a change, once and again, a state that has been walked through says what one that has not says."""
    live = make()
    state = TrainState(live, 0, 1)
    first = described(state)
    change(live)
    for _ in range(2):
        assert told(lambda: state) == told(lambda: TrainState(live, 0, 1)) != first


def test_nothing_is_walked_through_again_while_nothing_changes() -> None:
    """Steps, fills and new random numbers leave the walk as it is, and the leaves are the very same objects."""
    live = make()
    state = TrainState(live, 0, 1)
    before = state.snapshot()
    walk = state._walk
    step(live)
    torch.rand(3)
    live["ema"]["a"].add_(1)
    after = state.snapshot()
    assert state._walk is walk
    assert all(a is b for a, b in zip(before.leaves[: before.steady], after.leaves[: after.steady], strict=True))
    assert before.steady > 10


@pytest.mark.parametrize("name", ["n_averaged", "module"])
def test_what_a_wrapper_holds_is_watched_too(name: str) -> None:
    """An averaged model's own counter, or the model inside, is another one: the next snapshot has it."""
    average = AveragedModel(nn.Linear(2, 2))
    live = {"ema": average}
    state = TrainState(live, 0, 1)
    before = described(state)
    setattr(average, name, torch.tensor(7) if name == "n_averaged" else nn.Linear(2, 2))
    assert described(state) == described(TrainState(live, 0, 1)) != before


@pytest.mark.parametrize("outer", [AveragedModel, nn.DataParallel])
def test_what_a_wrapper_in_a_wrapper_holds_is_watched_too(outer: Callable[[nn.Module], nn.Module]) -> None:
    """Wrapped twice and more: the module in the innermost wrapper is another one, and the next snapshot has it."""
    wrapper = outer(nn.DataParallel(nn.DataParallel(nn.Linear(2, 2))))
    live = {"ema": wrapper}
    state = TrainState(live, 0, 1)
    before = described(state)
    wrapper.module.module.module = nn.Linear(2, 2)
    assert described(state) == described(TrainState(live, 0, 1)) != before


def test_a_module_that_overrides_its_state_is_asked_every_time() -> None:
    """Only a new walk can tell what such a module would hand over."""
    live = {"model": Custom()}
    state = TrainState(live, 0, 1)
    state.snapshot()
    live["model"].more = torch.zeros(7)
    assert {leaf.name: leaf.shape for leaf in state.snapshot().leaves}["more"] == (7,)


def test_pre_hooks_run_before_the_state_is_looked_at() -> None:
    """What a module does when its state is asked for, as FSDP2 reshards, it does at every save."""
    live = {"model": nn.Linear(2, 2)}
    asked = []
    live["model"].register_state_dict_pre_hook(lambda module, prefix, keep: asked.append(prefix))
    state = TrainState(live, 0, 1)
    asked.clear()
    for _ in range(3):
        state.snapshot()
    assert asked == ["", "", ""]


def test_a_part_of_the_state_does_not_disturb_the_walk() -> None:
    """A save of some groups looks at those alone, and the next whole save finds the earlier walk."""
    state = TrainState(make(), 0, 1)
    state.snapshot()
    walk = state._walk
    assert {leaf.group for leaf in state.snapshot(["model"]).leaves} == {"model"}
    state.snapshot()
    assert state._walk is walk

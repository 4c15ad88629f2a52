"""Restored weights and their full-precision copies never part without a word, wherever the copies live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from holdfast.state.masters import is_copy
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.state.train_state import TrainState
from holdfast_formats.errors import StateMismatch
from tests.client import frameworks
from tests.client.checkpoint_in_memory import Checkpoint, restore, save
from tests.client.state.test_object_table import Codes

Made = dict[str, Any]


def weights(seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def precise(parameter: torch.Tensor) -> torch.Tensor:
    """Full-precision values that round to the parameter, and are not it."""
    wide = parameter.detach().float()
    return torch.where(wide != 0, wide * (1 + 2.0**-12), wide)


class Apex(torch.optim.Optimizer):
    """As fused optimizers do it: the copy is made at the first step, from the weights of then, under a key of their own."""

    def __init__(self, parameters: Any, key: str = "master_param") -> None:
        super().__init__(parameters, {"lr": 0.125})
        self.key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                if not kept:
                    kept["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                    kept[self.key] = precise(parameter)
                kept["exp_avg"] += 1
                kept[self.key] -= group["lr"] * kept["exp_avg"]
                parameter.copy_(kept[self.key])


def stepped(state: Made) -> Made:
    state["optim"].step()
    return state


def in_optimizer(seed: int, key: str = "master_param") -> Made:
    model = weights(seed)
    return stepped({"model": model, "optim": Apex(model.parameters(), key)})


def in_wrapper(seed: int) -> Made:
    model = weights(seed)
    inner = Apex(model.parameters())
    inner.step()
    return {"model": model, "optim": frameworks.Accelerated(inner)}


def in_odd_key(seed: int) -> Made:
    return in_optimizer(seed, "p_hi")


def in_mapping(seed: int) -> Made:
    model = weights(seed)
    copies = {name: precise(parameter).requires_grad_() for name, parameter in model.named_parameters()}
    return {"model": model, "master": copies, "optim": torch.optim.SGD(copies.values(), lr=0.1)}


def in_module(seed: int) -> Made:
    """As Megatron-like code does it by hand: the optimizer steps an FP32 twin of the model."""
    model, twin = weights(seed), weights(seed, torch.float32)
    for parameter, copy in zip(model.parameters(), twin.parameters(), strict=True):
        copy.data.copy_(precise(parameter))
    return {"model": model, "fp32": twin, "optim": torch.optim.SGD(twin.parameters(), lr=0.1)}


def in_shards(seed: int) -> Made:
    model = weights(seed)
    names = [name for name, _ in model.named_parameters()]
    kept = {name: {"fp32_master": precise(parameter)} for name, parameter in model.named_parameters()}
    optim = OptimizerShards(groups=lambda: [{"params": names}], state=lambda: kept, install=lambda groups, values: None)
    return {"model": model, "optim": optim, "kept": Kept(kept)}


class Kept:
    """What a test looks at, and no save sees."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def state_dict(self) -> Any:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def copies_of(state: Made) -> dict[str, torch.Tensor]:
    """Every full-precision copy by the name of its weight."""
    if "master" in state:
        return dict(state["master"])
    if "fp32" in state:
        return dict(state["fp32"].named_parameters())
    if "kept" in state:
        return {name: kept["fp32_master"] for name, kept in state["kept"].kept.items()}
    inner = getattr(state["optim"], "optimizer", state["optim"])
    return {name: inner.state[p][inner.key] for name, p in state["model"].named_parameters()}


PLACES = [in_optimizer, in_wrapper, in_odd_key, in_mapping, in_module, in_shards]


@pytest.mark.parametrize("make", PLACES)
def test_weights_alone_are_refused_or_their_copies_follow(make: Callable[[int], Made]) -> None:
    """Refused by name with nothing changed; `from-model` makes every copy float32 of its weight, and the note says so."""
    checkpoint, live = save(make(1)), make(2)
    before = {name: copy.detach().clone() for name, copy in copies_of(live).items()}
    old = [parameter.detach().clone() for parameter in live["model"].parameters()]
    with pytest.raises(StateMismatch, match=r"4 full-precision masters \(0\.weight") as told:
        restore(checkpoint, live, groups=["model"])
    assert "from-model" in told.value.hint and told.value.members["stale"] == [*before]
    assert all(torch.equal(copy, before[name]) for name, copy in copies_of(live).items())
    assert all(map(torch.equal, old, live["model"].parameters()))
    done = restore(checkpoint, live, groups=["model"], from_model="from-model")
    assert any(note.startswith("4 full-precision masters were copied from the restored weights") for note in done.notes)
    for name, parameter in live["model"].named_parameters():
        assert torch.equal(copies_of(live)[name], parameter.float()), name
        assert torch.equal(parameter, checkpoint.tensors["model", name])


@pytest.mark.parametrize("make", PLACES)
def test_all_of_it_is_restored_without_a_word(make: Callable[[int], Made]) -> None:
    """The copies are those that were saved, not rounded ones."""
    saved, live = make(1), make(2)
    restore(save(saved), live)
    for name, copy in copies_of(saved).items():
        assert torch.equal(copies_of(live)[name], copy)
        assert not torch.equal(copy, copy.bfloat16().float()) or not copy.any()


def test_a_checkpoint_without_masters_sets_them_when_asked() -> None:
    """As Paddle's `master_weight_compatible`: the group is not needed then; what others are restored, are exact."""
    checkpoint = save(in_optimizer(1), ("model", "optim", "extra"))
    live = in_optimizer(2)
    with pytest.raises(StateMismatch, match=r"master/0\.weight"):
        restore(checkpoint, live)
    restore(checkpoint, live, from_model="from-model")
    for name, parameter in live["model"].named_parameters():
        assert torch.equal(copies_of(live)[name], parameter.float())
        assert torch.equal(live["optim"].state[parameter]["exp_avg"], checkpoint.tensors["optim", f"{name}/exp_avg"])


@pytest.mark.parametrize("options", [{"groups": ["model", "optim"]}, {"ignore": ["master/*"]}])
def test_an_optimizer_that_never_stepped_is_not_left_without_its_copies(options: Made) -> None:
    """Moments without masters would be gone on from by nobody: refused by name, or the masters are made from the weights."""
    model = weights(2)
    live = {"model": model, "optim": Apex(model.parameters())}
    saved = in_optimizer(1)
    checkpoint = save(saved)
    with pytest.raises(StateMismatch, match=r"4 full-precision masters \(0\.weight"):
        restore(checkpoint, live, **options)
    assert not live["optim"].state
    restore(checkpoint, live, **options, from_model="from-model")
    for name, parameter in model.named_parameters():
        assert torch.equal(copies_of(live)[name], parameter.float())
        assert torch.equal(parameter, checkpoint.tensors["model", name])
    live["optim"].step()  # it goes on from them


def test_an_optimizer_that_keeps_no_copies_needs_none() -> None:
    """Weights of full precision, or an optimizer with state and without copies: a note, as ever."""
    for dtype, steps in ((torch.float32, 0), (torch.bfloat16, 1)):
        model = weights(2, dtype)
        live = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)}
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            live["optim"].step()
        done = restore(save(in_optimizer(1)), live, groups=["model", "optim"], strict=False, cast=True)
        assert any("is restored without its master_param" in note for note in done.notes)


def test_copies_with_names_of_their_own_are_refused() -> None:
    """Nobody can tell whose copies they are: refused by name, unless they are restored."""

    def make(seed: int) -> Made:
        model = weights(seed)
        copies = {str(number): precise(parameter) for number, parameter in enumerate(model.parameters())}
        return {"model": model, "master": copies}

    checkpoint, live = save(make(1)), make(2)
    for retention_request in (None, "from-model"):
        with pytest.raises(StateMismatch, match=r"4 tensors of the group master \(0, 1, 2, 3\)"):
            restore(checkpoint, live, groups=["model"], from_model=retention_request)
    restore(checkpoint, live)
    assert all(torch.equal(live["master"][name], copy) for name, copy in make(1)["master"].items())


def test_two_trained_models_are_not_copies_of_each_other() -> None:
    """A precise module that is stepped beside the model, which is stepped itself, stays as it is."""
    model, critic = weights(1), weights(2, torch.float32)
    optim = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1)
    live = {"model": model, "critic": critic, "optim": optim}
    before = [parameter.detach().clone() for parameter in critic.parameters()]
    restore(save({"model": weights(5)}, ("model",)), live, groups=["model"])
    assert all(map(torch.equal, before, critic.parameters()))


def test_moments_are_no_copies() -> None:
    """Weights of zero, as fresh biases are, equal moments of zero: that alone says nothing."""
    model = weights(1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optim = Apex(model.parameters())
    for parameter in model.parameters():
        optim.state[parameter] = {"exp_avg": torch.zeros_like(parameter, dtype=torch.float32)}
    restore(save({"model": weights(5)}, ("model",)), {"model": model, "optim": optim}, groups=["model"])


def test_state_of_a_class_of_its_own_is_not_compared() -> None:
    """8-bit moments call themselves FP32, and may not know how to be cut or rounded."""
    weight = torch.ones(4, dtype=torch.bfloat16)
    assert not is_copy(Codes(torch.ones(4, dtype=torch.uint8), torch.ones(1)), weight)
    assert is_copy(torch.ones(4), weight) and not is_copy(torch.ones(4), torch.ones(4))


def test_frozen_and_ignored_weights_do_not_count() -> None:
    """Copies of weights that were not restored stay, and do not stop the restore of others."""
    checkpoint, live = save(in_mapping(1)), in_mapping(2)
    del live["master"]["1.weight"], live["master"]["1.bias"]  # those are frozen
    live["optim"] = torch.optim.SGD(live["master"].values(), lr=0.1)
    restore(checkpoint, live, groups=["model"], ignore=["model/0.*"])
    with pytest.raises(StateMismatch, match=r"2 full-precision masters \(0\.weight, 0\.bias\)"):
        restore(checkpoint, live, groups=["model"], ignore=["model/1.*"])


def test_tied_weights_have_one_copy() -> None:
    """Under the second name as well as under the first."""
    for name in ("a.weight", "b.weight"):
        model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)}).bfloat16()
        model["b"].weight = model["a"].weight  # type: ignore[assignment]
        state = {"model": model, "master": {name: precise(model["a"].weight)}}
        checkpoint = save({"model": model})
        with pytest.raises(StateMismatch, match=rf"1 full-precision masters \({name}\)"):
            restore(checkpoint, state, groups=["model"])
        restore(checkpoint, state, groups=["model"], from_model="from-model")
        assert torch.equal(state["master"][name], model["a"].weight.float())


@pytest.mark.parametrize(
    "wrap", [lambda m: AveragedModel(m), lambda m: {n: p.detach().float() for n, p in m.named_parameters()}]
)
def test_an_average_that_stays_behind_is_noted(wrap: Callable[[nn.Module], Any]) -> None:
    """Nothing steps from it, so it is no reason to refuse; but it is of other weights."""

    def make(seed: int) -> Made:
        model = weights(seed)
        return {"model": model, "ema": wrap(model)}

    checkpoint, live = save(make(1)), make(2)
    done = restore(checkpoint, live, groups=["model"])
    assert any("ema was not restored with the weights" in note for note in done.notes)
    assert not any("ema was not restored" in note for note in restore(checkpoint, live).notes)
    assert not any("ema was not restored" in note for note in restore(checkpoint, live, groups=["ema"]).notes)


def test_asked_for_nothing_says_so() -> None:
    """`from-model` in a state without copies, or that restores them, changes nothing, and the note says it."""
    for make in (lambda seed: {"model": weights(seed)}, in_mapping):
        saved, live = make(1), make(2)
        done = restore(save(saved), live, from_model="from-model")
        assert any(note.startswith("no full-precision master was set from the weights") for note in done.notes)
        assert all(map(torch.equal, saved.get("master", {}).values(), live.get("master", {}).values()))


def test_what_is_set_is_told_as_set() -> None:
    """A restore that failed half-way had torn the copies too: those that the next one sets are whole again."""
    checkpoint = save(in_optimizer(1))
    restoration = TrainState(in_optimizer(2), 0, 1).prepare(
        Checkpoint.stored(checkpoint), groups=["model"], from_model="from-model"
    )
    assert sorted(restoration.renewed) == ["master/0.bias", "master/0.weight", "master/1.bias", "master/1.weight"]

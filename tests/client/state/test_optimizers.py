"""Optimizer state by parameter name: stored, restored into fresh and running optimizers, regrouped."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.state.train_state import TrainState
from holdfast.tensors.fragments import Fragment
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client.checkpoint_in_memory import restore, save


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(steps)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.rand(5, 3, generator=generator).to(next(module.parameters()).dtype)).square().sum()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def parameters(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "running"])
def test_training_goes_on_bit_for_bit(kind, fresh):
    """Every kind of torch optimizer continues, in a fresh process or in place, exactly as if never interrupted."""
    module = model()
    optimizer = OPTIMIZERS[kind](module.parameters())
    step(module, optimizer)
    checkpoint = save({"model": module, "optim": optimizer})
    step(module, optimizer, 3)
    expected = parameters(module)

    other = model(seed=1)
    resumed = OPTIMIZERS[kind](other.parameters())
    if not fresh:
        step(other, resumed, 1)
    restoration = restore(checkpoint, {"model": other, "optim": resumed})
    assert not restoration.missing and not restoration.unexpected
    step(other, resumed, 3)
    assert all(map(torch.equal, parameters(other), expected))


def test_names_are_parameters_not_positions():
    """State is named by parameter and key, and hyper-parameters by the names in their group."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer, 1)
    snapshot = TrainState({"model": module, "optim": optimizer}, 0, 1).snapshot(["optim"])
    names = {leaf.name for leaf in snapshot.leaves}
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert names == {f"{name}/{key}" for name, _ in module.named_parameters() for key in keys}
    assert snapshot.groups == ("optim",) and set(snapshot.values["optim"]) == {"optim"}
    assert '"params":["0.weight","0.bias","1.weight","1.bias"]' in snapshot.values["optim"]["optim"]


def test_state_survives_regrouping():
    """Saved in one group, restored into two others in another order: every parameter keeps its own state."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.3)
    step(module, optimizer)
    other = model(1)
    weights = [p for n, p in other.named_parameters() if n.endswith("weight")]
    biases = [p for n, p in other.named_parameters() if n.endswith("bias")]
    regrouped = torch.optim.AdamW([{"params": biases}, {"params": weights[::-1]}], lr=0.5)
    restore(save({"model": module, "optim": optimizer}), {"model": other, "optim": regrouped})
    for (_, a), (_, b) in zip(module.named_parameters(), other.named_parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[a][key], regrouped.state[b][key])
    assert [group["lr"] for group in regrouped.param_groups] == [0.3, 0.3]


def test_groups_that_differ_are_refused_by_what_differs():
    """Where parameters of several stored groups meet in one live group, nobody can say whose values hold: it is refused,
    unless the live ones are kept, or it is excused, with a note.
    """
    module = model()
    first, *rest = module.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}])
    other = model(1)
    merged = torch.optim.SGD(other.parameters(), lr=0.9)
    checkpoint, twin = save({"model": module, "optim": optimizer}), {"model": other, "optim": merged}
    with pytest.raises(StateMismatch, match=r"optim.param_groups\[0\]: .* differ in lr \(0.1, 0.2\)") as told:
        restore(checkpoint, twin)
    assert "keep=('optim/lr',)" in told.value.hint
    assert merged.param_groups[0]["lr"] == 0.9
    assert restore(checkpoint, twin, keep=("optim/lr",)).notes == []
    assert merged.param_groups[0]["lr"] == 0.9
    restoration = restore(checkpoint, twin, strict=False)
    assert merged.param_groups[0]["lr"] == 0.1
    assert any("differ in lr" in note for note in restoration.notes)


def test_how_a_step_is_computed_stays():
    """The live choice of foreach, fused and capturable is no training state and stays."""
    module, other = model(), model(1)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, weight_decay=0.3)
    step(module, optimizer, 1)
    plain = torch.optim.AdamW(other.parameters(), foreach=False)
    restore(save({"model": module, "optim": optimizer}), {"model": other, "optim": plain})
    assert plain.param_groups[0]["fused"] is None and plain.param_groups[0]["foreach"] is False
    assert plain.param_groups[0]["weight_decay"] == 0.3


def test_restoring_does_not_cast_to_the_parameter():
    """FP32 moments of a BF16 model stay FP32: state has the stored dtype, not the parameter's."""
    module = model(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": torch.full(parameter.shape, 1 / 3)}
    other = model(1, torch.bfloat16)
    resumed = torch.optim.AdamW(other.parameters())
    restore(save({"model": module, "optim": optimizer}), {"model": other, "optim": resumed})
    for parameter in other.parameters():
        assert torch.equal(resumed.state[parameter]["exp_avg"], torch.full(parameter.shape, 1 / 3))


def test_live_state_is_filled_in_place():
    """State tensors that exist keep their identity, and nothing changes before the leaves are filled and applied."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    step(module, optimizer)
    checkpoint = save({"model": module, "optim": optimizer})
    saved = {id(p): optimizer.state[p]["exp_avg"].clone() for p in module.parameters()}
    step(module, optimizer)
    held = {id(p): optimizer.state[p]["exp_avg"] for p in module.parameters()}
    restore(checkpoint, {"model": module, "optim": optimizer})
    for parameter in module.parameters():
        assert optimizer.state[parameter]["exp_avg"] is held[id(parameter)]
        assert torch.equal(held[id(parameter)], saved[id(parameter)])


def test_preparing_leaves_a_fresh_optimizer_alone():
    """New state tensors stand beside the optimizer until apply."""
    module, other = model(), model(1)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer)
    resumed = torch.optim.AdamW(other.parameters(), lr=0.7)
    checkpoint = save({"model": module, "optim": optimizer})
    restoration = TrainState({"model": other, "optim": resumed}, 0, 1).prepare(checkpoint.stored())
    assert not resumed.state and resumed.param_groups[0]["lr"] == 0.7
    checkpoint.fill(restoration)
    assert not resumed.state
    restoration.apply()
    assert len(resumed.state) == 4


def test_a_parameter_that_never_stepped_is_fine():
    """Frozen parameters have no state, before and after."""
    module, other = model(), model(1)
    module[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer)
    resumed = torch.optim.AdamW(other.parameters())
    restoration = restore(save({"model": module, "optim": optimizer}), {"model": other, "optim": resumed})
    assert not restoration.missing and set(resumed.state) == set(other[1].parameters())


def test_state_that_the_checkpoint_lacks_is_missing():
    """Live state without a stored counterpart is reported, and refused when strict."""
    module, other = model(), model(1)
    checkpoint = save({"model": module, "optim": torch.optim.AdamW(module.parameters())})
    running = torch.optim.AdamW(other.parameters())
    step(other, running, 1)
    state = {"model": other, "optim": running}
    with pytest.raises(StateMismatch, match=r"optim/0\.weight/exp_avg"):
        TrainState(state, 0, 1).prepare(checkpoint.stored())
    assert "optim/0.weight/exp_avg" in restore(checkpoint, state, strict=False).missing


def test_state_of_other_shapes_and_kinds():
    """Per-parameter numbers, text, lists with tensors and odd shapes come back as they were."""
    module, other = model(), model(1)
    optimizer, resumed = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, other))
    odd = {"step": 7, "factor": torch.arange(5.0), "history": [torch.ones(2), None, "x"], "flag": True, "none": None}
    optimizer.state[module[0].weight] = odd
    restore(save({"model": module, "optim": optimizer}), {"model": other, "optim": resumed})
    back = resumed.state[other[0].weight]
    assert (back["step"], back["flag"], back["none"], back["history"][1:]) == (7, True, None, [None, "x"])
    assert torch.equal(back["factor"], odd["factor"]) and torch.equal(back["history"][0], torch.ones(2))


@pytest.mark.parametrize("key", ["master_param", "master_weights", "fp32_param", "main_param", "param_fp32"])
def test_full_precision_copies_get_their_own_group(key):
    """What an optimizer keeps under a known name is stored as master/<parameter> and comes back under its key."""
    module, other = model(dtype=torch.bfloat16), model(1, torch.bfloat16)
    optimizer, resumed = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, other))
    for parameter in module.parameters():
        optimizer.state[parameter] = {key: torch.rand(parameter.shape), "exp_avg": torch.rand(parameter.shape)}
    state = TrainState({"model": module, "optim": optimizer}, 0, 1)
    assert state.groups() == ("model", "master", "optim", "extra")
    masters = [leaf for leaf in state.snapshot().leaves if leaf.group == "master"]
    assert [leaf.name for leaf in masters] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    restoration = restore(save({"model": module, "optim": optimizer}), {"model": other, "optim": resumed})
    assert not restoration.unexpected
    for a, b in zip(module.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[a][key], resumed.state[b][key])


def test_masters_handed_over_name_the_parameters():
    """An optimizer over FP32 masters uses their names, and a copy it keeps of them as well is stored once."""
    module = model(dtype=torch.bfloat16)
    masters = {name: p.detach().float().requires_grad_() for name, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values())
    for tensor in masters.values():
        tensor.grad = torch.ones_like(tensor)
    optimizer.step()
    snapshot = TrainState({"model": module, "master": masters, "optim": optimizer}, 0, 1).snapshot()
    names = {(leaf.group, leaf.name) for leaf in snapshot.leaves}
    assert ("master", "0.weight") in names and ("optim", "0.weight/exp_avg") in names

    keeper = torch.optim.SGD(module.parameters(), lr=0.1)
    for name, parameter in module.named_parameters():
        keeper.state[parameter] = {"master_param": masters[name]}
    state = {"model": module, "master": masters, "optim": keeper}
    restoration = restore(save(state), state)
    assert len([leaf for leaf in restoration.leaves if leaf.group == "master"]) == 4


def test_state_of_a_declared_shard_lies_with_it():
    """State of a parameter declared as a Fragment is that part of the global state, whole or restored anew."""
    local = torch.arange(6.0).requires_grad_()
    optimizer = torch.optim.AdamW([local])
    local.grad = torch.ones(6)
    optimizer.step()
    state = TrainState({"model": {"w": Fragment(local, (4, 3), flat=(2, 8))}, "optim": optimizer}, 0, 1)
    leaves = {leaf.path: leaf for leaf in state.snapshot(["model", "optim"]).leaves}
    assert leaves["optim/w/exp_avg"].shape == (4, 3) and leaves["optim/w/step"].shape == ()
    assert [p.box for p in leaves["optim/w/exp_avg"].pieces] == [p.box for p in leaves["model/w"].pieces]

    whole = nn.Parameter(torch.zeros(4, 3))
    full = torch.optim.AdamW([whole])
    whole.grad = torch.ones(4, 3)
    full.step()
    checkpoint = save({"model": {"w": whole}, "optim": full})
    shard = torch.zeros(6, requires_grad=True)
    fresh = torch.optim.AdamW([shard])
    restore(checkpoint, {"model": {"w": Fragment(shard, (4, 3), flat=(2, 8))}, "optim": fresh})
    assert torch.equal(fresh.state[shard]["exp_avg"], full.state[whole]["exp_avg"].view(-1)[2:8])


def test_a_tensor_learning_rate_keeps_its_identity():
    """A tensor lr is filled in place; a number takes a stored tensor's value, and the other way round."""
    for saved_lr, live_lr in ((torch.tensor(0.25), torch.tensor(0.5)), (torch.tensor(0.25), 0.5), (0.25, torch.tensor(0.5))):
        module, other = model(), model(1)
        optimizer, resumed = torch.optim.SGD(module.parameters(), saved_lr), torch.optim.SGD(other.parameters(), live_lr)
        restore(save({"model": module, "optim": optimizer}), {"model": other, "optim": resumed})
        lr = resumed.param_groups[0]["lr"]
        assert float(lr) == 0.25 and type(lr) is type(live_lr)
        assert not isinstance(live_lr, torch.Tensor) or lr is live_lr


def test_a_new_group_keeps_its_own_values():
    """A live group of which no parameter was saved keeps its hyper-parameters, with a note."""
    module = model()
    checkpoint = save({"model": module, "optim": torch.optim.SGD(module[0].parameters(), lr=0.1)})
    groups = [{"params": list(module[0].parameters()), "lr": 0.5}, {"params": list(module[1].parameters()), "lr": 0.6}]
    grown = torch.optim.SGD(groups)
    restoration = restore(checkpoint, {"model": module, "optim": grown})
    assert [group["lr"] for group in grown.param_groups] == [0.1, 0.6]
    assert any("param_groups[1]" in note for note in restoration.notes)


def test_what_cannot_be_named_is_refused():
    """A foreign parameter, a parameter with two owners, and state of no parameter are refused, with names and hints."""
    module = model()
    stranger = torch.optim.SGD([*module.parameters(), nn.Parameter(torch.zeros(9))], lr=0.1)
    with pytest.raises(InvalidRequest, match=r"opt\.param_groups\[0\]\['params'\]\[4\], of shape \[9\]") as caught:
        TrainState({"model": module, "opt": stranger}, 0, 1)
    assert "master" in caught.value.hint
    twice = {"a": torch.optim.SGD(module.parameters()), "b": torch.optim.SGD(module[0].parameters()), "model": module}
    with pytest.raises(InvalidRequest, match=r"parameter 0\.weight is in two optimizers: a and b"):
        TrainState(twice, 0, 1)
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.state["global"] = {"k": 1}
    with pytest.raises(InvalidRequest, match=r"optim\.state\['global'\]"):
        TrainState({"model": module, "optim": optimizer}, 0, 1).snapshot()


def test_what_cannot_be_stored_is_refused_by_path():
    """A function among hyper-parameters or per-parameter values is named by its path."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters())
    optimizer.param_groups[0]["rule"] = len
    with pytest.raises(InvalidRequest, match=r"optim\.groups\.0\.weight\.rule"):
        TrainState({"model": module, "optim": optimizer}, 0, 1).snapshot()
    del optimizer.param_groups[0]["rule"]
    optimizer.state[module[1].bias]["fn"] = [len]
    with pytest.raises(InvalidRequest, match=r"optim\.state\.1\.bias\.fn\[0\]"):
        TrainState({"model": module, "optim": optimizer}, 0, 1).snapshot()


def test_two_optimizers_share_the_group():
    """Two optimizers over different parameters have a document each in one group."""
    module = model()
    optimizers = {
        "a": torch.optim.SGD(module[0].parameters(), lr=0.1),
        "b": torch.optim.AdamW(module[1].parameters(), lr=0.2),
    }
    snapshot = TrainState({"model": module, **optimizers}, 0, 1).snapshot()
    assert set(snapshot.values["optim"]) == {"a", "b"}


def test_a_rank_that_holds_nothing_of_a_parameter_says_nothing_of_its_steps():
    """Under FSDP1 only ranks with a part of a parameter step it: a count kept by another rank would contradict theirs, and a
    restore gives it none."""
    held = nn.Parameter(torch.empty(0))
    fragment = Fragment(torch.empty(0), (4,), flat=(0, 0), held=held)
    optimizer = torch.optim.AdamW([held])
    optimizer.state[held] = {"step": torch.tensor(3.0), "exp_avg": torch.empty(0), "exp_avg_sq": torch.empty(0)}
    snapshot = TrainState({"model": {"w": fragment}, "optim": optimizer}, 1, 2).snapshot()
    names = {leaf.key for leaf in snapshot.leaves}
    assert ("optim", "w/step") not in names and ("optim", "w/exp_avg") in names

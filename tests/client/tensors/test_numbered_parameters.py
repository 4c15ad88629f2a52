"""Optimizer state with numbers in place of names goes to the parameters that have these numbers in the live optimizer."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from holdfast.state.optimizer_resume import with_names
from holdfast.state.train_state import OfferedLeaves, TrainState
from holdfast.tensors import numbered_parameters, optimizer_documents
from holdfast_formats.errors import StateMismatch
from tests.client.checkpoint_in_memory import Checkpoint

MASTER = "master_param"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3))


def grouped(module: nn.Module) -> torch.optim.Optimizer:
    """Matrices first, then vectors, as a Trainer groups them; and a group without parameters."""
    matrices = [one for one in module.parameters() if one.dim() > 1]
    vectors = [one for one in module.parameters() if one.dim() == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": []}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.rand(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()


def numbered(checkpoint: Checkpoint, optimizer: torch.optim.Optimizer, module: nn.Module) -> OfferedLeaves:
    """What an import offers of the same state: `0/exp_avg`, and a document that says so."""
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    order = [names[id(tensor)] for group in optimizer.param_groups for tensor in group["params"]]
    numbers = {name: str(number) for number, name in enumerate(order)}
    for group in ("optim", "master"):
        renamed = {}
        for name, spec in checkpoint.specs.get(group, {}).items():
            owner, slash, key = name.rpartition("/") if group == "optim" else (name, "", "")
            renamed[f"{numbers[owner]}{slash}{key}"] = spec
            checkpoint.tensors[group, f"{numbers[owner]}{slash}{key}"] = checkpoint.tensors.pop((group, name))
        checkpoint.specs[group] = renamed
    stored = checkpoint.stored()
    text = optimizer_documents.renamed(stored.values["optim"]["optim"], {name: (n,) for name, n in numbers.items()})
    values = {**stored.values, "optim": {"optim": json.dumps({**json.loads(text), "numbered": True})}}
    return stored._replace(values=values, imported=True)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "running"])
def test_training_goes_on_bit_for_bit(fresh: bool) -> None:
    module = model()
    optimizer = grouped(module)
    train(module, optimizer, 2, seed=1)
    checkpoint = Checkpoint(TrainState({"model": module, "optim": optimizer}, 0, 1).snapshot())
    stored = numbered(checkpoint, optimizer, module)
    live = model()
    again = grouped(live)
    if not fresh:
        train(live, again, 1, seed=7)
    found = TrainState({"model": live, "optim": again}, 0, 1).prepare(stored)
    checkpoint.fill(found)
    found.apply()
    assert any("6 numbered parameters of optim/optim" in note for note in found.notes)
    for each, its in ((module, optimizer), (live, again)):
        train(each, its, 3, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), live.parameters(), strict=True))


def test_full_precision_copies_go_by_number_too() -> None:
    """They are in group `master`, under the number alone."""
    module = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for tensor in module.parameters():
        optimizer.state[tensor][MASTER] = tensor.detach().float() + 0.001
    checkpoint = Checkpoint(TrainState({"model": module, "optim": optimizer}, 0, 1).snapshot())
    stored = numbered(checkpoint, optimizer, module)
    assert set(stored.specs["master"]) == {"0", "1"}
    live = nn.Linear(2, 2).to(torch.bfloat16)
    again = torch.optim.SGD(live.parameters(), lr=0.1)
    found = TrainState({"model": live, "optim": again}, 0, 1).prepare(stored)
    checkpoint.fill(found)
    found.apply()
    for mine, theirs in zip(live.parameters(), module.parameters(), strict=True):
        assert torch.equal(again.state[mine][MASTER], optimizer.state[theirs][MASTER])


def test_another_optimizer_is_refused() -> None:
    """Groups of other sizes, and parameters of other shapes under a number."""
    module = model()
    optimizer = grouped(module)
    train(module, optimizer, 1, seed=1)
    checkpoint = Checkpoint(TrainState({"model": module, "optim": optimizer}, 0, 1).snapshot())
    stored = numbered(checkpoint, optimizer, module)
    live = model()
    one_group = TrainState({"model": live, "optim": torch.optim.AdamW(live.parameters())}, 0, 1)
    with pytest.raises(StateMismatch, match="groups of 3, 3, and the live optimizer has groups of 6") as refused:
        one_group.prepare(stored)
    assert "restore(groups=…)" in refused.value.hint
    turned = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 4))
    with pytest.raises(StateMismatch, match=r"of parameter \d has shape"):
        TrainState({"model": turned, "optim": grouped(turned)}, 0, 1).prepare(stored)


def test_documents_with_names_stay_as_they_are() -> None:
    module = model()
    optimizer = grouped(module)
    train(module, optimizer, 1, seed=1)
    checkpoint = Checkpoint(TrainState({"model": module, "optim": optimizer}, 0, 1).snapshot())
    named = checkpoint.stored()._replace(imported=True)
    stored = numbered(checkpoint, optimizer, module)
    assert numbered_parameters.is_numbered(stored, "optim")
    assert not numbered_parameters.is_numbered(stored._replace(imported=False), "optim")
    for offered in (named, stored._replace(values={})):
        assert not numbered_parameters.is_numbered(offered, "optim")
        assert with_names(offered, [], declared=False) is offered


def test_a_declared_layout_is_refused() -> None:
    """It describes tensors by their names."""
    module = model()
    optimizer = grouped(module)
    train(module, optimizer, 1, seed=1)
    state = TrainState({"model": module, "optim": optimizer}, 0, 1)
    stored = numbered(Checkpoint(state.snapshot()), optimizer, module)
    with pytest.raises(StateMismatch, match="numbers in place of names") as refused:
        with_names(stored, state._parts().optimizers, declared=True)
    assert "without layout=" in refused.value.hint

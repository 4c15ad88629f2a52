"""Live tensors of another system's names, saved through a mapping program: any mesh gives the checkpoint's own tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import ParallelLayout
from holdfast.launch import Launch
from holdfast.layout.declared import declare
from holdfast.state.train_state import TrainState
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.layout import language
from holdfast_formats.programs import load
from tests.client.checkpoint_in_memory import Checkpoint
from tests.formats.programs.test_remade import LLAMA, MOE, Named, shard, stored
from tests.layouts import models

STAGED = "sharding=3:stage1:flat"
MESHES = [
    "",
    "tp=2",
    "tp=2,pp=2",
    "pp=2,dp=2",
    STAGED,
    "tp=2,sharding=2:stage1:whole",
    "sharding=2:stage3:dim0",
    "tp=2,vocab=3",
]
EXPERTS = ["", "ep=2,dp=2", "tp=2,ep=2,dp=2", "tp=2,ep=2,etp=1,pp=2", "ep=4,dp=4,sharding=2:stage1:flat"]
DENSE = ["hf-megatron", "hf-megatron-stacked", "hf-paddle", "hf-titan", "hf-titan-legacy"]
MIXED = ["hf-megatron-moe", "hf-megatron-stacked-moe", "hf-paddle-qwen-moe", "hf-titan-qwen3", "hf-stacked"]
CASES = [(name, LLAMA, mesh) for name in DENSE for mesh in MESHES] + [
    (name, MOE, mesh) for name in MIXED for mesh in EXPERTS
]
EACH = pytest.mark.parametrize(
    ("name", "model", "mesh"), CASES, ids=[f"{name}-{mesh or 'alone'}" for name, _, mesh in CASES]
)

Shares = Callable[[str, str, int, str], Named]  # program, layout, rank, group -> that rank's local tensors


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Shares:
    """What a rank of a layout holds, as shards are read through a program."""
    root = tmp_path_factory.mktemp("shares")
    built = {model.name: stored(root / model.name, model) for model in (LLAMA, MOE)}

    @cache
    def of(program: str, layout: str, rank: int, group: str) -> Named:
        model = "moe" if program in MIXED else "llama"
        return shard(built[model], load(program), layout, rank, group)

    return of


def tensors(arrays: Named, names: list[str] | None = None) -> dict[str, nn.Parameter]:
    """Parameters in the natural order of their names; of those that a rank has no part of, empty ones."""
    found = {name: arrays.get(name, np.zeros(0, np.float32)) for name in names or sorted(arrays, key=natural_key)}
    return {name: nn.Parameter(torch.from_numpy(np.array(array))) for name, array in found.items()}


def rank_state(state: dict[str, Any], model: models.Model, layout: str, rank: int, program: object) -> TrainState:
    world = language.parse(layout).mesh.world
    declared = declare(ParallelLayout(layout, config=model.config, program=program), Launch(rank, world, "l", world), {})
    return TrainState(state, rank, world, declared)


def live(shares: Shares, name: str, layout: str, rank: int, scale: float = 1, stepped: bool = True) -> dict[str, Any]:
    """A rank's model, masters and optimizer; masters are twice the weights, and moments too, as shards are."""
    whole = re.sub(":stage[13](:[a-z0-9]+)?", ":stage0", layout)
    names = sorted(shares(name, whole, rank, "model"), key=natural_key)
    weights = shares(name, layout, rank, "model")
    moments = shares(name, layout, rank, "optim")
    kept = {of.removesuffix("/exp_avg"): array for of, array in moments.items() if of.endswith("/exp_avg")}
    model = tensors({of: array * np.float32(scale) for of, array in weights.items()}, names)
    master = tensors({of: array * np.float32(scale) for of, array in kept.items()}, names)
    optim = torch.optim.AdamW(master.values(), lr=0.5)
    for of, parameter in master.items() if stepped else ():
        if of in kept:
            optim.state[parameter] = {"exp_avg": torch.from_numpy(np.array(kept[of])), "step": torch.tensor(7.0)}
    return {"model": model, "master": master, "optim": optim}


def check(state: dict[str, Any], shares: Shares, name: str, layout: str, rank: int) -> None:
    weights, moments = shares(name, layout, rank, "model"), shares(name, layout, rank, "optim")
    for of, array in weights.items():
        np.testing.assert_array_equal(state["model"][of].detach().numpy(), array, of)
    for of, array in moments.items():
        parameter, _, word = of.rpartition("/")
        if parameter in moments or word == "exp_avg":
            np.testing.assert_array_equal(state["optim"].state[state["master"][parameter]][word].numpy(), array, of)
            np.testing.assert_array_equal(state["master"][parameter].detach().numpy(), moments[f"{parameter}/exp_avg"], of)


@EACH
def test_any_mesh_saves_the_checkpoints_own_tensors(name: str, model: models.Model, mesh: str, shares: Shares) -> None:
    """Names, shapes and every element are those of the checkpoint; nothing is there twice, and nothing is missing."""
    world, whole = language.parse(mesh).mesh.world, model.arrays()
    states = [rank_state(live(shares, name, mesh, rank), model, mesh, rank, name) for rank in range(world)]
    saved = Checkpoint(*(state.snapshot() for state in states))
    assert {group: set(specs) for group, specs in saved.specs.items() if group != "extra"} == {
        "model": set(whole),
        "master": set(whole),
        "optim": {f"{of}/{key}" for of in whole for key in ("exp_avg", "step")},
    }
    for of, array in whole.items():
        for found, factor in (("model", 1), ("master", 2)):
            np.testing.assert_array_equal(saved.tensors[found, of].numpy(), array * factor, of)
        np.testing.assert_array_equal(saved.tensors["optim", f"{of}/exp_avg"].numpy(), array * 2, of)
        assert saved.tensors["optim", f"{of}/step"].item() == 7


TURNS = [
    *((name, LLAMA, a, b) for name in DENSE for a, b in [("tp=2,pp=2", STAGED), (STAGED, "tp=2"), ("", "tp=2,vocab=3")]),
    *((name, MOE, a, b) for name in MIXED for a, b in [("ep=2,dp=2", "tp=2,ep=2,etp=1,pp=2"), ("tp=2,ep=2,etp=1,pp=2", "")]),
]


@pytest.mark.parametrize(("name", "model", "source", "target"), TURNS, ids=[f"{n}-{a}-{b}" for n, _, a, b in TURNS])
def test_another_mesh_restores_it_and_saves_the_same_again(
    name: str, model: models.Model, source: str, target: str, shares: Shares
) -> None:
    """Bit for bit, optimizer included; and what was restored is saved in the names that it was restored from."""
    ranks = range(language.parse(source).mesh.world)
    saved = Checkpoint(*(rank_state(live(shares, name, source, r), model, source, r, name).snapshot() for r in ranks))
    again = []
    for rank in range(language.parse(target).mesh.world):
        state = live(shares, name, target, rank, 0, stepped=rank % 2 == 0)
        found = rank_state(state, model, target, rank, name)
        restoration = found.prepare(saved.stored(rank))
        saved.fill(restoration)
        restoration.apply()
        check(state, shares, name, target, rank)
        again.append(found.snapshot())
    second = Checkpoint(*again)
    assert {**second.specs, "extra": 0} == {**saved.specs, "extra": 0}
    for key, tensor in saved.tensors.items():
        assert key[0] == "extra" or torch.equal(second.tensors[key], tensor), key

"""Compact checkpoints of several ranks: any other world gets the same values, and masters bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import Fragment
from holdfast.rest import retention
from holdfast.rest.api import Api
from holdfast_formats.rest.retention import RetentionPolicy
from tests.daemons import RunningDaemon, running, wait_until
from tests.kit.ranks import World

RUN, SHAPE = "cut", (12, 1000)  # ranks cut blocks of 256 columns anywhere
WORLD = 3


def rank_state(rank: int, world: int, seed: int | None) -> dict[str, Any]:
    """Columns of a weight, of its master and of the master's moments; without a seed nothing that could be restored."""
    first, stop = (SHAPE[1] * at // world for at in (rank, rank + 1))
    whole = torch.zeros(SHAPE) if seed is None else torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    master = nn.Parameter(whole[:, first:stop].clone())
    optim = torch.optim.AdamW([master], lr=0.01)
    for _ in range(3 if seed is not None else 0):
        master.grad = torch.sin(7 * master.detach())
        optim.step()
    weight = master.detach().bfloat16()
    place = {"offset": (0, first)}
    return {
        "model": {"w": Fragment(weight, SHAPE, **place)},
        "master": {"w": Fragment(master, SHAPE, **place)},
        "optim": optim,
    }


def held(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a rank has: weight, master and moments."""
    master = state["master"]["w"].tensor
    return {"weight": state["model"]["w"].tensor, "master": master.detach(), **state["optim"].state[master]}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """A daemon with a compact checkpoint of three ranks, and an exact one."""
    with running(tmp_path_factory.mktemp("worlds") / "root", listen="127.0.0.1:0") as daemon:
        world = World(daemon, RUN, [rank_state(rank, WORLD, 1) for rank in range(WORLD)])
        for step in (1, 2):
            assert world.save(step) == [None] * WORLD
        world.close()
        with Api(daemon.url) as api:
            retention.set_policy(api, RUN, RetentionPolicy(optim="int8", optim_full=1), "*")
            wait_until(lambda: [c.compacted is not None for c in api.checkpoints(RUN)] == [False, True])
        yield daemon


@pytest.mark.parametrize("ranks", [1, 2, WORLD, 5])
def test_any_world_restores_it(daemon: RunningDaemon, ranks: int) -> None:
    """Each rank gets its columns of one and the same values."""
    with holdfast.open(f"{RUN}@1", root=daemon.root) as checkpoint:
        small = checkpoint.manifest.compacted
        assert small is not None
        assert {name: one.coding for of in small.tensors.values() for name, one in of.items()} == {
            "w": "low16",
            "w/exp_avg": "int8",
            "w/exp_avg_sq": "int8-log",
        }
        read = checkpoint.reader.read
        whole = {name: read("optim", f"w/{name}") for name in ("exp_avg", "exp_avg_sq")}
        whole |= {"master": read("master", "w"), "weight": read("model", "w")}
    saved = [held(rank_state(rank, WORLD, 1)) for rank in range(WORLD)]
    exact = torch.cat([one["master"] for one in saved], dim=1)
    assert whole["master"].tobytes() == exact.numpy().tobytes()
    states = [rank_state(rank, ranks, None) for rank in range(ranks)]
    world = World(daemon, RUN, states, launch=f"to-{ranks}")
    assert world.restore(step=1) == [1] * ranks
    assert all(any("stored as int8" in note for note in rank.last_restore.notes) for rank in world.ranks)
    for rank, state in enumerate(states):
        columns = slice(*(SHAPE[1] * at // ranks for at in (rank, rank + 1)))
        found = held(state)
        assert found["step"] == 3
        for name, values in whole.items():
            got = found[name].view(torch.int16).numpy().view(np.uint16) if name == "weight" else found[name].numpy()
            assert np.array_equal(got, values[:, columns].view(got.dtype)), name
    world.close()

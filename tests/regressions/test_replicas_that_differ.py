"""Ranks that hold one tensor hold the same bytes, or the save is refused, or each gets its own back: never another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpointer, Fragment, ParallelLayout
from holdfast_formats.errors import CheckpointError, InvalidRequest, ReplicasDiffer
from tests.client import llama
from tests.daemons import RunningDaemon
from tests.kit.ranks import World


def differs(errors: list[CheckpointError | None], *tensors: str, ranks: list[int]) -> None:
    """Every rank was told the same: which tensors, on which ranks."""
    for error in errors:
        assert isinstance(error, ReplicasDiffer), error
        assert error.members["tensors"] == list(tensors)
        assert error.members["ranks"] == ranks
        assert tensors[0] in error.detail and "layout=" in error.hint and "Fragment" in error.hint


def stepped(seed: int = 0) -> dict[str, Any]:
    """A model and its optimizer after a step."""
    torch.manual_seed(seed)
    model = nn.Linear(8, 8)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 8)).sum().backward()
    optim.step()
    return {"model": model, "optim": optim}


@pytest.mark.parametrize("size", [5, 300_000])
def test_plain_tensors_that_differ_are_refused_by_name(daemon: RunningDaemon, run: str, size: int) -> None:
    """Hand-made sharding without a word of it, one byte of difference or all: tensor and ranks are named."""
    states = [{"model": {"same": torch.ones(3), "w": torch.zeros(size)}} for _ in range(3)]
    states[2]["model"]["w"][size - 2] = 1  # a launch's first save compares all of it
    world = World(daemon, run, states)
    differs(world.save(1), "model/w", ranks=[2])
    states[2]["model"]["w"].zero_()
    assert world.save(2) == [None] * 3
    states[0]["model"]["w"].fill_(7)  # later ones a sample
    differs(world.save(3), "model/w", ranks=[1, 2])
    for state in states:
        state["model"]["w"].fill_(float("nan"))
    assert world.save(4) == [None] * 3  # bytes are compared, not numbers
    states[1]["model"]["w"].view(torch.int32)[...] += 1
    differs(world.save(5), "model/w", ranks=[1])
    assert world.restore(step=4) == [4] * 3
    world.close()


@pytest.mark.parametrize("of", ["parameter", "moment", "master"])
def test_moments_and_masters_are_compared_as_parameters_are(daemon: RunningDaemon, run: str, of: str) -> None:
    states = [stepped(), stepped()]
    for state in states:
        state["master"] = {"weight": torch.ones(8, 8)}
    weight = states[1]["model"].weight
    found = {
        "parameter": weight.data,
        "moment": states[1]["optim"].state[weight]["exp_avg"],
        "master": states[1]["master"]["weight"],
    }
    found[of][3, 3] += 1
    world = World(daemon, run, states)
    named = {"parameter": "model/weight", "moment": "optim/weight/exp_avg", "master": "master/weight"}
    differs(world.save(1), named[of], ranks=[1])
    world.close()


def test_only_those_that_hold_the_same_box_are_compared(daemon: RunningDaemon, run: str) -> None:
    """Stages hold different tensors, shards different boxes; the two replicas of a shard are compared with each other."""

    def part(rank: int) -> dict[str, Any]:
        half = torch.full((4, 8), float(rank % 2))
        return {"model": {f"stage{rank // 2}": torch.ones(4), "w": Fragment(half, (8, 8), offset=(4 * (rank % 2), 0))}}

    states = [part(rank) for rank in range(4)]
    world = World(daemon, run, states)
    assert world.save(1) == [None] * 4
    states[3]["model"]["w"].tensor[0, 0] = 9
    differs(world.save(2), "model/w", ranks=[3])
    world.close()


def test_one_rank_in_its_first_save_is_compared_with_others_that_are_not(daemon: RunningDaemon, run: str) -> None:
    """What was never saved before is digested whole by each rank for itself; the sample is what they have in common."""
    states = [{"model": {"w": torch.zeros(100_000)}} for _ in range(2)]
    world = World(daemon, run, states)
    assert world.save(1) == [None] * 2
    states[1]["model"]["w"] = torch.zeros(100_000)  # another object of the same name
    assert world.save(2) == [None] * 2
    states[1]["model"]["w"] += 1
    differs(world.save(3), "model/w", ranks=[1])
    world.close()


def noisy(rank: int) -> dict[str, Any]:
    """Replicas in all but batch statistics and a replay buffer with its position."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.full((2, 4), 1.0 + rank) + torch.arange(2)[:, None] * rank)
    replay = {"position": rank, "frames": torch.full((3,), float(rank))}
    return {"model": model, "replay": replay, "seen": torch.tensor(rank), "epoch": 3}


def own(state: dict[str, Any]) -> list[Any]:
    replay = state["replay"]
    return [state["model"][1].running_mean.tolist(), replay["position"], replay["frames"].tolist(), int(state["seen"])]


@pytest.mark.parametrize("warm", [True, False])
def test_buffers_and_extra_tensors_that_differ_are_each_ranks_own(daemon: RunningDaemon, run: str, warm: bool) -> None:
    """Each rank gets its batch statistics and its replay buffer back, with the position that belongs to it."""
    states = [noisy(rank) for rank in range(3)]
    states[1]["seen"] = torch.tensor(0)  # two of three agree
    expected = [own(state) for state in states]
    world = World(daemon, run, states)
    assert world.save(1) == [None] * 3
    if not warm:
        world.save(2)
        world.close()
    later = [noisy(7) for _ in range(3)]
    again = world if warm else World(daemon, run, later, "b")
    if warm:
        for state in states:
            state["model"][1].running_mean.zero_(), state["replay"]["frames"].zero_(), state["seen"].fill_(9)
    assert again.restore(step=1) == [1] * 3
    assert {rank.last_restore.source for rank in again.ranks} == {"slot" if warm else "directory"}
    assert [own(state) for state in (states if warm else later)] == expected
    again.close()


def test_another_world_takes_what_ranks_had_apart_as_it_takes_their_values(daemon: RunningDaemon, run: str) -> None:
    """Rank modulo the saved world, tensors and JSON alike; Hugging Face's names hold the lowest rank's."""
    states = [noisy(rank) for rank in range(2)]
    expected = [own(state) for state in states]
    world = World(daemon, run, states)
    assert world.save(1) == [None] * 2
    world.close()
    more = [noisy(9) for _ in range(3)]
    larger = World(daemon, run, more, "b")
    assert larger.restore() == [1] * 3
    assert [own(state) for state in more] == [*expected, expected[0]]
    larger.close()
    alone = noisy(9)
    with Checkpointer(run, alone, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 1
        assert not any(name.startswith("ranks/") for name in checkpointer.last_restore.unexpected)
    assert own(alone) == expected[0]


def test_a_save_without_the_group_extra_has_the_lowest_ranks_buffers(daemon: RunningDaemon, run: str) -> None:
    """There is no place for the others' own, and no rank gets a mixture."""
    states = [noisy(rank) for rank in range(2)]
    expected = states[0]["model"][1].running_mean.tolist()
    world = World(daemon, run, states)
    assert world.save(1, groups=("model",)) == [None] * 2
    for state in states:
        state["model"][1].running_mean.zero_()
    assert world.restore(step=1, groups=("model",)) == [1] * 2
    assert [state["model"][1].running_mean.tolist() for state in states] == [expected] * 2
    world.close()


def test_a_layout_whose_rules_name_nothing_is_refused(daemon: RunningDaemon, run: str) -> None:
    """A matrix that no rule knows may be cut or whole: nobody can say, so nobody guesses."""
    states = [
        {"model": {"mystery.weight": nn.Parameter(torch.zeros(8, 8)), "scale": nn.Parameter(torch.ones(8))}}
        for _ in range(2)
    ]
    world = World(daemon, run, states, layout=ParallelLayout("tp=2", config=llama.CONFIG))
    for rank in world.ranks:
        with pytest.raises(InvalidRequest, match=r"mystery\.weight"):
            rank.save(1)
    world.close()

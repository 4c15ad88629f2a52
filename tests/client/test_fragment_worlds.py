"""Worlds that hold tensors as lists of Fragments, as Megatron's ranks do: saved by a daemon, restored in others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from holdfast import Fragment
from tests.daemons import RunningDaemon
from tests.kit.ranks import World
from tests.regressions.test_replicas_that_differ import differs

HALF, COLUMNS = 12, 10
SHAPE = (2 * HALF, COLUMNS)  # gate above up
WHOLE = torch.randn(SHAPE)


def local(source: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """A tensor-parallel rank's fused parameter: its rows of gate, and below them its rows of up."""
    share = HALF // tp
    return torch.cat([source[share * rank :][:share], source[HALF + share * rank :][:share]])


def fused(held: torch.Tensor, tp: int, rank: int) -> list[Fragment]:
    """The two boxes that such a parameter has of the whole tensor."""
    share = HALF // tp
    corners = [share * rank, HALF + share * rank]
    return [Fragment(held[share * n : share * (n + 1)], SHAPE, offset=(at, 0), held=held) for n, at in enumerate(corners)]


def ranged(source: torch.Tensor, layout: tuple[int, int], rank: int) -> list[Fragment]:
    """What a rank of a distributed optimizer has of that parameter: its range of the elements, cut where gate ends."""
    tp, dp = layout
    size, share = 2 * HALF // tp * COLUMNS, HALF // tp
    edge, held = share * COLUMNS, local(source, tp, rank % tp).reshape(-1)
    start, stop = (size * (rank // tp + n) // dp for n in (0, 1))
    found = []
    for n, corner in enumerate([share * (rank % tp), HALF + share * (rank % tp)]):
        a, b = max(start, n * edge), min(stop, (n + 1) * edge)
        if a < b:
            place = (a - n * edge, b - n * edge)
            found.append(Fragment(held[a:b].clone(), SHAPE, offset=(corner, 0), box=(share, COLUMNS), flat=place))
    return found


def megatron(source: torch.Tensor, tp: int, dp: int) -> list[dict[str, Any]]:
    """The states of all ranks: weights replicated over `dp`, masters divided over it."""
    return [
        {
            "model": {"w": fused(local(source, tp, rank % tp).bfloat16(), tp, rank % tp)},
            "master": {"w": ranged(source, (tp, dp), rank)},
        }
        for rank in range(tp * dp)
    ]


def check(states: list[dict[str, Any]], source: torch.Tensor) -> None:
    """Every part of every rank has the bytes of its place."""
    for state in states:
        for group, expected in (("model", source.bfloat16()), ("master", source)):
            for part in state[group]["w"]:
                found = torch.cat([expected[box.slices].reshape(-1) for box in part.boxes])
                assert torch.equal(part.tensor.reshape(-1), found)


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (1, 3), (3, 2)])
def test_a_world_of_another_layout_and_a_whole_one(daemon: RunningDaemon, run: str, tp: int, dp: int) -> None:
    """TP and a distributed optimizer: the files have whole tensors, which other worlds restore in place, and back."""
    world = World(daemon, run, megatron(WHOLE, tp, dp))
    assert world.save(1) == [None] * (tp * dp)
    world.close()
    [step] = (daemon.root / run / "checkpoints").iterdir()
    assert torch.equal(load_file(next(step.rglob("master*.safetensors")))["w"], WHOLE)
    assert torch.equal(load_file(next(step.rglob("model*.safetensors")))["w"], WHOLE.bfloat16())

    for other in ((2, 1), (1, 4), (2, 2)):
        states = megatron(torch.zeros(SHAPE), *other)
        world = World(daemon, run, states, launch=f"to-{other[0]}-{other[1]}")
        assert world.restore() == [1] * len(states)
        check(states, WHOLE)
        world.close()
    alone = {"model": {"w": torch.zeros(SHAPE, dtype=torch.bfloat16)}, "master": {"w": torch.zeros(SHAPE)}}
    world = World(daemon, run, [alone], launch="whole")
    assert world.restore() == [1] and torch.equal(alone["master"]["w"], WHOLE)
    alone["master"]["w"].neg_()
    alone["model"]["w"].neg_()
    assert world.save(2) == [None]
    world.close()
    states = megatron(torch.zeros(SHAPE), tp, dp)
    world = World(daemon, run, states, launch="back")
    assert world.restore() == [2] * len(states)
    check(states, -WHOLE)
    world.close()


def test_replicas_of_a_part_are_compared(daemon: RunningDaemon, run: str) -> None:
    """A weight's part that data-parallel ranks do not hold alike is refused by name; so is a part that nobody holds."""
    states = megatron(WHOLE, 2, 2)
    states[3]["model"]["w"][1].tensor[0, 0] += 1
    world = World(daemon, run, states)
    differs(world.save(1), "model/w", ranks=[3])
    states[3]["model"]["w"][1].tensor[0, 0] = states[1]["model"]["w"][1].tensor[0, 0]
    states[2]["master"]["w"][:] = [Fragment(torch.empty(0), SHAPE, flat=(0, 0))]  # noticed, though the list is the same
    assert all("the ranks hold" in error.detail and "'w' of group 'master'" in error.detail for error in world.save(2))
    world.close()


def trained(source: torch.Tensor, rank: int) -> tuple[dict[str, Any], nn.Parameter]:
    parameter = nn.Parameter(local(source, 2, rank))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    return {"model": {"w": fused(parameter, 2, rank)}, "optim": optimizer}, parameter


def step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
    parameter.grad = parameter.detach().sin()
    optimizer.step()


def test_a_step_right_after_the_save_changes_nothing_of_it(daemon: RunningDaemon, run: str) -> None:
    """Parts and moments are copied behind the training's back, as they were at the save; a fresh world goes on with them."""
    pairs = [trained(WHOLE, rank) for rank in (0, 1)]
    for state, parameter in pairs:
        step(state["optim"], parameter)
    world = World(daemon, run, [state for state, _ in pairs])
    before = [(p.detach().clone(), state["optim"].state[p]["exp_avg"].clone()) for state, p in pairs]
    tickets = [rank.save(1) for rank in world.ranks]
    for state, parameter in pairs:
        step(state["optim"], parameter)
    assert all(ticket.result(180) for ticket in tickets)
    after = [parameter.detach().clone() for _, parameter in pairs]
    world.close()

    fresh = [trained(torch.zeros(SHAPE), rank) for rank in (0, 1)]
    world = World(daemon, run, [state for state, _ in fresh], launch="b")
    assert world.restore() == [1, 1]
    for (state, parameter), (weight, moment), later in zip(fresh, before, after, strict=True):
        assert torch.equal(parameter, weight) and torch.equal(state["optim"].state[parameter]["exp_avg"], moment)
        step(state["optim"], parameter)
        assert torch.equal(parameter, later)
    world.close()

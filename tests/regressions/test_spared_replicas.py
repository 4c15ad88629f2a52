"""One rank of a node stages what several hold: the same checkpoints, restored from memory as before; drift is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Fragment
from holdfast_formats.errors import ReplicasDiffer, StateMismatch, TornSnapshot
from tests.daemons import RunningDaemon, shared_memory
from tests.kit.ranks import World

SIDE = 512  # a square of floats is above `SPARED_BYTES_MIN`


def state(layers: int = 3) -> dict[str, Any]:
    """A model and its optimizer after a step, as each rank of DDP has them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(SIDE, SIDE) for _ in range(layers)])
    made = {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}
    train(made, 0)
    return made


def train(of: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in of["model"].parameters():
        parameter.grad = torch.randn_like(parameter)
    of["optim"].step()


def tensors(of: dict[str, Any]) -> list[torch.Tensor]:
    return [*of["model"].parameters(), *(t for one in of["optim"].state.values() for t in one.values())]


def distinct(of: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors(of))


def staged(world: World) -> list[int]:
    """Bytes of each rank's last slot."""
    return [rank._saves._contents.layout.data_bytes for rank in world.ranks]


def files(daemon: RunningDaemon, run: str, step: int) -> dict[str, bytes]:
    found = (daemon.root / run / "checkpoints").glob(f"step-*{step}/*.safetensors")
    return {path.name: path.read_bytes() for path in sorted(found)}


def advance(states: list[dict[str, Any]], world: World, step: int, **options: Any) -> None:
    for one in states:
        train(one, step)
    assert world.save(step, **options) == [None] * len(states)


def test_a_node_holds_one_copy_from_the_second_save_on(daemon: RunningDaemon, run: str) -> None:
    """What one rank stages for others is balanced, the memory of the rest is given back, and the files are the same."""
    states = [state() for _ in range(3)]
    world = World(daemon, run, states, slots=1)
    for rank in world.ranks:
        rank.prepare(wait=True)  # what is still being touched is returned by a later save
    advance(states, world, 1)
    assert min(staged(world)) >= distinct(states[0])
    for step in (2, 3):
        advance(states, world, step)
        assert sum(staged(world)) <= 1.1 * distinct(states[0])
        assert max(staged(world)) <= 0.5 * distinct(states[0])
        assert shared_memory(daemon) <= 1.1 * distinct(states[0]) + 3 * 2**18  # superblocks, headers, tables
    world.close()
    whole = World(daemon, f"{run}-whole", states)  # the first save of a launch
    assert whole.save(3) == [None] * 3
    assert min(staged(whole)) >= distinct(states[0])
    assert files(daemon, run, 3) == files(daemon, f"{run}-whole", 3) != {}
    whole.close()


@pytest.mark.parametrize("again", ["same", "next"])
def test_every_rank_restores_from_memory(daemon: RunningDaemon, run: str, again: str) -> None:
    """Each rank finds in the others' slots what it has not staged itself, also as another launch."""
    states = [state() for _ in range(2)]
    world = World(daemon, run, states)
    for step in (1, 2):
        advance(states, world, step)
    expected = [tensor.clone() for tensor in tensors(states[0])]
    for one in states:
        train(one, 9)
    if again == "next":
        for rank in world.ranks:
            rank._session.link.close()
        states = [state() for _ in range(2)]
        world = World(daemon, run, states, "b")
    assert world.restore() == [2, 2]
    assert {rank.last_restore.source for rank in world.ranks} == {"slot"}
    for one in states:
        assert all(map(torch.equal, tensors(one), expected))
    advance(states, world, 3)  # and goes on
    world.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_that_drift_apart_are_refused_whoever_stages_them(daemon: RunningDaemon, run: str, rank: int) -> None:
    states = [state() for _ in range(2)]
    world = World(daemon, run, states)
    for step in (1, 2):
        advance(states, world, step)
    assert sum(staged(world)) <= 1.1 * distinct(states[0])
    for number, parameter in enumerate(states[rank]["model"].parameters()):
        if number % 2 == 0:  # each weight: of some this rank stages the bytes, of others not
            parameter.data += 1
    for error in world.save(3):
        assert isinstance(error, ReplicasDiffer)
        assert sorted(error.members["tensors"]) == [f"model/{layer}.weight" for layer in range(3)]
    for number, parameter in enumerate(states[rank]["model"].parameters()):
        if number % 2 == 0:
            parameter.data.copy_(list(states[1 - rank]["model"].parameters())[number])
    advance(states, world, 4)
    assert world.restore(step=4) == [4, 4]
    world.close()


def test_a_rank_that_gives_a_tensor_up_is_noticed_and_all_stage_everything(daemon: RunningDaemon, run: str) -> None:
    """A save that has no bytes of a tensor is refused by its name; the next one is whole, and so are all later ones."""
    states = [{"model": {name: torch.ones(SIDE, SIDE) for name in "abcd"}} for _ in range(2)]
    world = World(daemon, run, states, fenced=True)
    assert world.save(1) == world.save(2) == [None] * 2
    given_up = next(f.spec.name for f in world.ranks[0]._saves._contents.layout.fragments if f.boxes)
    del states[0]["model"][given_up]  # which rank 1 has left to rank 0
    for error in world.save(3):
        assert isinstance(error, StateMismatch) and f"'{given_up}'" in error.detail and "left it to another" in error.detail
        assert "save again" in error.hint
    for step in (4, 5):
        assert world.save(step) == [None] * 2
        assert staged(world)[1] >= 4 * SIDE * SIDE * 4
    states[1]["model"][given_up].zero_()
    assert world.restore(strict=False) == [5, 5]
    assert states[1]["model"][given_up].eq(1).all()
    world.close()


def test_sharded_moments_and_replicated_weights(daemon: RunningDaemon, run: str) -> None:
    """As ZeRO-1 has them: only the weights are staged once, and each rank gets its own moments back."""

    def sharded(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        moments = Fragment(torch.randn(SIDE // 2, SIDE), (SIDE, SIDE), offset=(rank * SIDE // 2, 0))
        return {"model": {"w": torch.full((SIDE, SIDE), 3.0), "v": torch.full((SIDE, SIDE), 4.0)}, "moments": {"w": moments}}

    states = [sharded(rank) for rank in range(2)]
    world = World(daemon, run, states, fenced=True)
    for step in (1, 2):
        assert world.save(step) == [None] * 2
    assert max(staged(world)) <= 1.1 * (SIDE * SIDE * 4 * 3 / 2)
    for rank, one in enumerate(states):
        one["model"]["w"].zero_(), one["model"]["v"].zero_(), one["moments"]["w"].tensor.zero_()
        assert not torch.equal(one["moments"]["w"].tensor, sharded(rank)["moments"]["w"].tensor)
    assert world.restore() == [2, 2]
    for rank, one in enumerate(states):
        assert torch.equal(one["moments"]["w"].tensor, sharded(rank)["moments"]["w"].tensor)
        assert one["model"]["w"].eq(3).all() and one["model"]["v"].eq(4).all()
    world.close()


def test_what_changes_before_it_was_sampled_is_torn(
    daemon: RunningDaemon, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write between `save()` and the sample fails the save by the tensor's name, on both ranks' tickets."""
    from holdfast.stage import background_copy

    states = [state() for _ in range(2)]
    world = World(daemon, run, states)
    advance(states, world, 1)
    advance(states, world, 2)
    begin = background_copy.BackgroundCopy.start

    def write_first(copy: background_copy.BackgroundCopy) -> None:
        with torch.no_grad():
            for parameter in states[1]["model"].parameters():
                parameter += 0
        begin(copy)

    monkeypatch.setattr(background_copy.BackgroundCopy, "start", write_first)
    errors = world.save(3)
    assert all(isinstance(error, TornSnapshot) for error in errors), errors
    monkeypatch.undo()
    advance(states, world, 4)
    world.close()


def test_groups_alone_and_new_tensors(daemon: RunningDaemon, run: str) -> None:
    """A save of some groups, and one with more tensors than were compared, have all of theirs."""
    states = [state() for _ in range(2)]
    world = World(daemon, run, states)
    advance(states, world, 1)
    advance(states, world, 2, groups=("model",))
    for one in states:
        one["more"] = {"w": nn.Parameter(torch.full((SIDE, SIDE), 5.0))}
    for step in (3, 4, 5):
        advance(states, world, step)
    expected = [tensor.clone() for tensor in tensors(states[1])]
    for one in states:
        train(one, 9)
    assert world.restore() == [5, 5]
    assert all(map(torch.equal, tensors(states[1]), expected)) and states[0]["more"]["w"].eq(5).all()
    world.close()

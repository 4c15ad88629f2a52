"""State that a restore gives to every rank is dropped where its parameter is stepped by another rank."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.state.partitioned.owners import RestoredForAll
from holdfast.state.train_state import TrainState
from holdfast.tensors.optimizer_documents import merged
from tests.client.checkpoint_in_memory import Checkpoint


def state_of(owned: tuple[int, ...], seed: int = 1) -> dict[str, Any]:
    """A model of three parameters, of which an optimizer has stepped some."""
    torch.manual_seed(seed)
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(4)) for name in "abc"})
    optimizer = torch.optim.SGD(model.values(), lr=0.1, momentum=0.9)
    step(model, optimizer, owned, ())
    return {"model": model, "optim": optimizer}


def step(model: Any, optimizer: Any, owned: tuple[int, ...], received: tuple[int, ...]) -> None:
    parameters = list(model.values())
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full((4,), 2.0) if number in owned else None
    optimizer.step()
    for number in received:
        parameters[number].data.sub_(0.3)


def restored(world: int) -> tuple[TrainState, dict[str, Any]]:
    """A fresh state, into which a checkpoint of two ranks was restored that owned a and c, and b."""
    ranks = [TrainState(state_of(owned), rank, 2).snapshot() for rank, owned in enumerate([(0, 2), (1,)])]
    for snapshot in ranks:
        assert '"idle":' in snapshot.values["optim"]["optim"]
    checkpoint, state = Checkpoint(*ranks), state_of((), 2)
    text = merged([snapshot.values["optim"]["optim"] for snapshot in ranks])
    assert '"idle":["b","a","c"]' in text
    offered = checkpoint.stored()
    offered = offered._replace(values={**offered.values, "optim": {"optim": text}})
    live = TrainState(state, 0, world)
    restoration = live.prepare(offered)
    checkpoint.fill(restoration)
    restoration.apply()
    return live, state


def held(live: TrainState) -> set[str]:
    return {leaf.name for leaf in live.snapshot().leaves if leaf.group == "optim"}


def test_what_another_rank_stepped_is_dropped() -> None:
    """Not before it has stepped, and only what it stepped."""
    live, state = restored(1)
    assert held(live) == {f"{name}/momentum_buffer" for name in "abc"}
    step(*state.values(), (0, 2), (1,))
    assert held(live) == {"a/momentum_buffer", "c/momentum_buffer"}
    assert state["model"]["b"] not in state["optim"].state


def test_what_nothing_stepped_stays() -> None:
    """A parameter that is frozen now, and a model that is changed without a step."""
    live, state = restored(1)
    step(*state.values(), (0,), ())
    assert "b/momentum_buffer" in held(live)
    live, state = restored(1)
    step(*state.values(), (), (0, 1, 2))
    assert held(live) == {f"{name}/momentum_buffer" for name in "abc"}


def test_nothing_is_looked_at_without_need() -> None:
    assert not RestoredForAll().pending
    plain = TrainState(state_of((0, 1, 2)), 0, 1).snapshot()
    assert '"idle":' not in plain.values["optim"]["optim"]

"""Objects of registered classes: stored as what one function makes of them, and made again by the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast import register_class
from holdfast.tensors import json_values, registered
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.client.checkpoint_in_memory import restore, save


class Projector:
    """As GaLore's."""

    def __init__(self, rank: int, matrix: Any = None) -> None:
        self.rank, self.matrix = rank, matrix


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_by_class", {})
    register_class(Projector, vars, made_again)


def made_again(kept: dict[str, Any]) -> Projector:
    """A copy, which is right only if the tensors have their values by now."""
    many = isinstance(kept["matrix"], list)
    copies = [None if one is None else one.clone() for one in (kept["matrix"] if many else [kept["matrix"]])]
    return Projector(kept["rank"], copies if many else copies[0])


def state(rank: int, matrix: torch.Tensor) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"step": 3, "projector": Projector(rank, [matrix, None])}
    return {"model": model, "optim": optimizer, "spare": [Projector(7, matrix)]}


@pytest.mark.usefixtures("known")
def test_objects_come_back_with_their_tensors() -> None:
    """In an optimizer's state, and in any container."""
    live = state(1, torch.zeros(3, 2))
    restore(save(state(2, torch.arange(6.0).view(3, 2))), live)
    projector = live["optim"].state[live["model"].weight]["projector"]
    assert type(projector) is Projector and projector.rank == 2 and projector.matrix[1] is None
    assert torch.equal(projector.matrix[0], torch.arange(6.0).view(3, 2))
    assert live["spare"][0].rank == 7 and torch.equal(live["spare"][0].matrix, projector.matrix[0])


def test_a_class_that_is_not_registered_is_refused_by_name(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a save with the line to write; at a restore before anything changes."""
    saved = save(state(2, torch.ones(2)))
    monkeypatch.setattr(registered, "_by_class", {})
    with pytest.raises(InvalidRequest, match=r"optim\.state\.weight\.projector: .*Projector") as refused:
        save(state(1, torch.ones(2)))
    assert "holdfast.register_class(Projector, take, make)" in refused.value.hint
    live = state(1, torch.ones(2))
    del live["spare"]
    live["optim"].state.clear()
    with pytest.raises(StateMismatch, match="test_registered:Projector was stored, which is not registered"):
        restore(saved, live, strict=False)
    assert not live["optim"].state


def test_functions_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_by_class", {})
    register_class(Projector, vars, lambda kept: Projector(kept["other"]))
    text = json_values.dumps(Projector(1), "here")
    with pytest.raises(StateMismatch, match=r"test_registered:Projector refuses what was stored: 'other'"):
        json_values.loads(text, "here")
    with pytest.raises(InvalidRequest, match="takes a class"):
        register_class(Projector(1), vars, vars)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="make of register_class"):
        register_class(Projector, vars, None)  # type: ignore[arg-type]

"""The one rule: what a save leaves out, or a restore does not use or replaces, is a warning and a notice where allowed."""

from __future__ import annotations

import warnings
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpointer, LeftOutWarning
from tests.daemons import running


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory):
    with running(tmp_path_factory.mktemp("left-out") / "root") as daemon:
        yield daemon.socket


class Buffered(nn.Linear):
    """A model with a table that it makes itself, as models of transformers say it."""

    _keys_to_ignore_on_save = ("table",)

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("table", torch.arange(3.0))


def test_a_save_that_leaves_out_warns_once_and_keeps_a_notice(at: Path) -> None:
    """Both what the user excludes and what a module says it makes itself: the first save warns at the caller's line."""
    state = {"model": Buffered(), "replay": torch.ones(2)}
    with Checkpointer("saves", state, at=at) as checkpointer:
        with pytest.warns(LeftOutWarning) as told:
            checkpointer.save(1, exclude=("extra/replay",)).result()
        assert [Path(one.filename).name for one in told] == [Path(__file__).name] * 2
        assert "saves@1" in str(told[0].message)
        assert "model/table" in str(told[0].message)
        assert "extra/replay" in str(told[1].message)
        assert checkpointer.notices == tuple(str(one.message) for one in told)
        with warnings.catch_warnings():
            warnings.simplefilter("error", LeftOutWarning)  # it is no news
            ticket = checkpointer.save(2, exclude=("extra/replay",))
        assert len(ticket.notes) == 2
        assert len(checkpointer.notices) == 2


RESTORES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "not in the checkpoint": ({"a": 1}, {"a": 0, "b": 2}, {"strict": False}, "extra/b"),
    "not in the state": ({"a": 1, "b": 2}, {"a": 0}, {"strict": False}, "extra/b"),
    "excluded": ({"a": 1, "b": 2}, {"a": 0, "b": 0}, {"exclude": ("extra/b",)}, "extra/b"),
    "a group that the state lacks": ({"a": 1, "model": nn.Linear(2, 2)}, {"a": 0}, {}, "model"),
    "rounded": ({"t": torch.ones(2)}, {"t": torch.ones(2).bfloat16()}, {"cast": True}, "extra/t"),
    "replaced": ({"d": deque([1], 3)}, {"d": deque([2], 4)}, {}, "d: the live deque"),
}


@pytest.mark.parametrize("case", RESTORES)
def test_a_restore_that_does_not_use_or_replaces_warns(case: str, at: Path) -> None:
    """Whatever was allowed, the warning and the notice name it."""
    saved, live, options, name = RESTORES[case]
    run = f"restores-{case.replace(' ', '-')}"
    with Checkpointer(run, saved, at=at) as checkpointer:
        checkpointer.save(1).result()
    with Checkpointer(run, live, at=at) as checkpointer:
        with pytest.warns(LeftOutWarning) as told:
            assert checkpointer.restore(**options) == 1
        assert len(told) == 1
        assert name in str(told[0].message)
        assert checkpointer.notices == (str(told[0].message),)
        assert checkpointer.last_restore is not None
        assert any(name in note for note in checkpointer.last_restore.notes)


def test_groups_that_the_caller_chose_are_no_news(at: Path) -> None:
    """`groups=` says what a save or restore is about: nothing else of the state is spoken of."""
    state = {"model": nn.Linear(2, 2), "a": 1}
    with Checkpointer("chosen", state, at=at) as checkpointer:
        checkpointer.save(1).result()
        checkpointer.restore(groups=("model",))
        checkpointer.save(2, groups=("model",)).result()
        assert checkpointer.notices == ()


def test_an_optimizer_that_joined_the_state_after_construction_leaves_no_gradients_out(at: Path) -> None:
    """A framework makes its optimizers late: their steps are seen from the restore on, not from the first save on."""
    model = nn.Linear(2, 2)
    with Checkpointer("late", {"model": model, "optim": torch.optim.SGD(model.parameters(), 0.1)}, at=at) as checkpointer:
        checkpointer.save(1).result()
    state: dict[str, Any] = {"model": model}
    with Checkpointer("late", state, at=at) as checkpointer:
        optimizer = state["optim"] = torch.optim.SGD(model.parameters(), 0.1)
        assert checkpointer.restore() == 1
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        ticket = checkpointer.save(2)
        ticket.result()
    assert ticket.notes == ()

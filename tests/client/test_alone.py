"""A Checkpointer for one rank alone: its options, its world, and what it refuses."""

from __future__ import annotations

import inspect

import pytest
import torch

from holdfast import Checkpointer, Fragment
from holdfast.checkpointer_options import Options
from holdfast_formats import naming
from holdfast_formats.errors import InvalidRequest, StateMismatch
from tests.daemons import RunningDaemon


@pytest.fixture(autouse=True)
def rank_1_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun says to the second of two ranks, and a launch that they share."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "HOLDFAST_LAUNCH": "both"}.items():
        monkeypatch.setenv(name, value)


def test_it_has_the_same_options() -> None:
    """One list of names, which type checkers see."""
    theirs = inspect.signature(Checkpointer.__init__).parameters.values()
    assert {one.name for one in theirs if one.kind is one.KEYWORD_ONLY} == set(Options.__annotations__)


def test_it_saves_and_restores_without_the_other_rank(daemon: RunningDaemon) -> None:
    """It is rank 0 of a world of one: its assets count, and nobody is waited for."""
    state = {"model": torch.nn.Linear(3, 3), "epoch": 1}
    expected = state["model"].weight.detach().clone()
    with Checkpointer.alone("alone-run", state, at=daemon.socket, assets={"notes": "mine"}, keep_last=1) as checkpointer:
        assert checkpointer.restore() == 0
        checkpointer.save(1, wait="durable", assets={"log": "one"})
        state["epoch"] = 2
        torch.nn.init.zeros_(state["model"].weight)
        assert checkpointer.restore() == 1
    assert state["epoch"] == 1 and torch.equal(state["model"].weight, expected)
    directory = daemon.root / naming.checkpoint_path("alone-run", 1)
    assert (directory / "notes").read_bytes() == b"mine" and (directory / "log").read_bytes() == b"one"
    assert Checkpointer.alone("alone-run", state, at=daemon.socket).restore() == 1


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Fragment(torch.ones(2, 3), (4, 3), offset=(2, 0)), "holds 6 of its 12 elements"),
        (Fragment(torch.ones(5), (4, 3), flat=(0, 5)), "holds 5 of its 12 elements"),
        (Fragment(torch.ones(0, 3), (4, 3), offset=(0, 0)), "holds 0 of its 12 elements"),
    ],
)
def test_a_part_is_refused_by_name(daemon: RunningDaemon, part: Fragment, says: str) -> None:
    """Nobody saves the rest. It is refused before anything is staged, and what is whole can be saved after it."""
    state = {"x": torch.ones(2), "table": part, "whole": Fragment(torch.ones(4, 3), (4, 3), offset=(0, 0))}
    with Checkpointer.alone(f"parts-{says.split()[1]}", state, at=daemon.socket) as checkpointer:
        for _ in range(2):
            with pytest.raises(StateMismatch, match=rf"'table' of group 'extra'.*{says}") as refused:
                checkpointer.save(1)
            assert "every rank" in refused.value.hint
        del state["table"]
        checkpointer.save(1, wait="durable")


def test_what_makes_no_sense_is_refused(daemon: RunningDaemon) -> None:
    """Options that do not exist, a launch of several ranks, and a layout of several ranks."""
    state = {"model": torch.nn.Linear(2, 2)}
    with pytest.raises(TypeError, match="world"):
        Checkpointer.alone("alone-run", state, world=2)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest):
        Checkpointer.alone("alone-run", state, at=daemon.socket, layout="tp=2")
    with pytest.raises(InvalidRequest, match="slots"):
        Checkpointer.alone("alone-run", state, slots=0)
    assert Checkpointer("alone-run", state, at=daemon.socket)._launch[:2] == (1, 2), "only alone() is alone"

"""A state that has gained a group since it was saved: the group is named, or the rest restored; nothing begins anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast_formats import naming
from holdfast_formats.errors import Damaged, InvalidRequest, StateMismatch
from tests.daemons import RunningDaemon, running

ALL = ("model", "optim", "ema", "extra")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("groups") / "root") as found:
        save(found)
        yield found


@pytest.fixture(scope="module")
def unserved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a daemon that has ended."""
    with running(tmp_path_factory.mktemp("groups") / "unserved") as found:
        save(found)
    return found.root


def save(daemon: RunningDaemon) -> None:
    """All of an earlier state at 5 and 10, and the model alone at 11."""
    with Checkpointer("grown", state(1, ema=False), at=daemon.socket) as checkpointer:
        for step in (5, 10):
            checkpointer.save(step, wait="durable")
        checkpointer.save(11, groups=["model"], wait="durable")


def state(seed: int, ema: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    made: dict[str, Any] = {"model": model, "optim": torch.optim.AdamW(model.parameters()), "epoch": seed}
    return made | ({"ema": {"weight": torch.full((2, 3), 9.0)}} if ema else {})


def launched(run: str, live: dict[str, Any], place: RunningDaemon | Path) -> Checkpointer:
    return Checkpointer(run, live, at=place if isinstance(place, Path) else place.socket)


@pytest.mark.parametrize("how", ["daemon", "unserved"])
def test_a_group_that_no_checkpoint_has_is_named(how: str, request: pytest.FixtureRequest) -> None:
    """restore() said 0, begin from nothing, though there were steps to go on from. It says which group they lack."""
    live = state(2)
    checkpointer = launched("grown", live, request.getfixturevalue(how))
    with checkpointer, pytest.raises(StateMismatch, match="step 10 has the most") as told:
        checkpointer.restore()
    assert told.value.members["missing"] == ["ema"] and "exclude=['ema/*']" in told.value.hint
    assert live["epoch"] == 2


@pytest.mark.parametrize("options", [{"strict": False}, {"exclude": ["ema/*"]}], ids=str)
@pytest.mark.parametrize("how", ["daemon", "unserved"])
def test_the_rest_is_restored_where_that_is_asked_for(options: Any, how: str, request: pytest.FixtureRequest) -> None:
    """The newest step with the rest, not the newest of all, and what the group holds stays."""
    live, expected = state(2), state(1, ema=False)
    with launched("grown", live, request.getfixturevalue(how)) as checkpointer:
        assert checkpointer.restore(groups=ALL, **options) == 10  # with groups no daemon is started
        assert checkpointer.last_restore is not None
        if "strict" in options:
            assert any("ema" in note for note in checkpointer.last_restore.notes)
            assert checkpointer.last_restore.missing == ("ema/weight",)
    assert torch.equal(live["model"].weight, expected["model"].weight) and live["epoch"] == 1
    assert torch.equal(live["ema"]["weight"], torch.full((2, 3), 9.0))


@pytest.mark.parametrize("how", ["daemon", "unserved"])
def test_groups_that_somebody_restores_later(how: str, request: pytest.FixtureRequest) -> None:
    """The newest that has them too, and they stay as they are; where none has them that is said."""
    live = state(2)
    with launched("grown", live, request.getfixturevalue(how)) as checkpointer:
        assert checkpointer.restore(groups=["model"]) == 11
        assert checkpointer.restore(groups=["model"], needs=["optim"]) == 10
        assert not live["optim"].state
        with pytest.raises(StateMismatch, match="lacks ema"):
            checkpointer.restore(groups=["model"], needs=["ema"])


def test_groups_asked_for_by_name_are_named_too(daemon: RunningDaemon) -> None:
    """What was asked for and is in no checkpoint is an error; a run without checkpoints still begins with 0."""
    with launched("grown", state(2), daemon) as checkpointer:
        with pytest.raises(StateMismatch, match="lacks ema"):
            checkpointer.restore(groups=["ema"])
        assert checkpointer.restore(groups=["model"]) == 11
    with launched("nothing-yet", state(2), daemon) as checkpointer:
        assert checkpointer.restore() == checkpointer.restore(strict=False) == 0


def test_where_the_only_one_with_all_groups_is_damaged_that_is_said(daemon: RunningDaemon) -> None:
    """An older checkpoint with all groups that cannot be read is what is wrong then, not the groups of newer ones."""
    run = "damaged-and-partial"
    with Checkpointer(run, state(1), at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        checkpointer.save(2, groups=["model"], wait="durable")
    data = next((daemon.root / naming.checkpoint_path(run, 1)).glob("ema*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1])
    with launched(run, state(2), daemon) as checkpointer, pytest.raises(Damaged):
        checkpointer.restore()


def test_patterns_that_match_nothing_are_told(daemon: RunningDaemon) -> None:
    """Most of them are spelled wrongly. A whole group that only the live state has is left out on purpose."""
    with launched("grown", state(2), daemon) as checkpointer:
        checkpointer.restore(10, exclude=("ema/*", "model/wieght", "model/bias"))
        assert checkpointer.last_restore is not None
        told = [note for note in checkpointer.last_restore.notes if "exclude=" in note]
        left_out = "left out by exclude=, so not restored: model/bias"
        assert told == [left_out, "exclude= matches no name of the checkpoint: model/wieght"]


@pytest.mark.parametrize("option", ["strict", "healthy", "prove_first", "cast"])
def test_options_are_true_or_false(daemon: RunningDaemon, option: str) -> None:
    """`cast="no"` would count as true."""
    live = state(2, ema=False)
    with launched("grown", live, daemon) as checkpointer, pytest.raises(InvalidRequest, match=f"{option} must be True"):
        checkpointer.restore(10, **{option: "no"})  # type: ignore[arg-type]
    assert live["epoch"] == 2

"""What is switched on around a call (inference mode, a default device, torch.compile) changes neither it nor later ones."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from holdfast import Checkpointer
from holdfast_formats import naming
from holdfast_formats.errors import DaemonGone, InvalidRequest, NotCommitted
from tests.daemons import RunningDaemon, running


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory):
    """One daemon for all tests of this file; each uses a run of its own."""
    with running(tmp_path_factory.mktemp("surroundings") / "root") as daemon:
        yield daemon


def trained(seed: int, size: int = 8) -> dict:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": optimizer, "x": torch.randn(3000), "nested": {"t": [torch.randn(3)]}}
    step(state)
    return state


def step(state: dict) -> None:
    size = state["model"][0].in_features
    state["model"](torch.randn(4, size)).square().sum().backward()
    state["optim"].step()


def tensors(state: dict) -> list[torch.Tensor]:
    kept = [value for held in state["optim"].state.values() for value in held.values()]
    return [t.detach().clone() for t in (*state["model"].state_dict().values(), *kept, state["x"], state["nested"]["t"][0])]


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("call", ["save", "prepare", "restore"])
def test_a_call_in_another_mode_breaks_none_that_follow(daemon: RunningDaemon, around: object, call: str) -> None:
    """Whatever mode a call is made in, it and later saves are exact, and changes under the copy are found as ever."""
    name = getattr(around, "__name__", "x").strip("<>")
    state = trained(1)
    with Checkpointer(f"{call}-{name}", state, at=daemon.socket, fenced=True) as checkpointer:
        checkpointer.save(1, wait="durable")
        with around():  # type: ignore[operator]
            if call == "save":
                checkpointer.save(2, wait="durable")
            elif call == "prepare":
                checkpointer.prepare(wait=True)
            else:
                assert checkpointer.restore() == 1
        step(state)
        before = tensors(state)
        checkpointer.save(3, wait="durable")
        step(state)
        assert checkpointer.restore() == 3
        assert all(map(torch.equal, tensors(state), before))
        step(state)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_default_device_is_for_the_users_tensors_only(daemon: RunningDaemon) -> None:
    """A default device, here one without memory, changes nothing that we make for ourselves."""
    state = trained(1)
    before = tensors(state)
    with Checkpointer("default-device", state, at=daemon.socket) as checkpointer:
        torch.set_default_device("meta")
        try:
            checkpointer.save(1, wait="durable")
            drawn = random.random(), float(np.random.rand()), torch.rand((), device="cpu")
            state["x"].zero_()
            assert checkpointer.restore() == 1
            assert (random.random(), float(np.random.rand()), torch.rand((), device="cpu")) == drawn
        finally:
            torch.set_default_device(None)
    assert all(map(torch.equal, tensors(state), before))


def test_what_was_made_in_inference_mode_is_saved(daemon: RunningDaemon) -> None:
    """torch counts no writes to such a tensor; it is copied, and its samples are looked at."""
    with torch.inference_mode():
        made = torch.arange(100_000.0)
    state = {"made": made}
    with Checkpointer("inference", state, at=daemon.socket, fenced=True) as checkpointer:
        checkpointer.save(1, wait="durable")
        with torch.inference_mode():
            made.zero_()
        assert checkpointer.restore() == 1
        assert torch.equal(made, torch.arange(100_000.0))


def test_a_compiled_step_waits_for_the_copy(daemon: RunningDaemon) -> None:
    """torch.compile of an optimizer's step leaves the fence in its place, and does not trace into it."""
    state = trained(1, 700)
    compiled = torch.compile(state["optim"].step, backend="eager")
    with Checkpointer("compiled", state, at=daemon.socket) as checkpointer:
        for number in (1, 2, 3):
            state["model"](torch.randn(4, 700)).sum().backward()
            ticket = checkpointer.save(number)
            copy = checkpointer._saves._last._copy
            compiled()
            assert copy._first.done.is_set()
            ticket.result(180)


def test_numbers_of_numpy_are_numbers(daemon: RunningDaemon) -> None:
    """Steps and metrics may be numpy's. What is no number is refused by name, and so are steps that cannot be."""
    with Checkpointer("numbers", {"x": torch.ones(2)}, at=daemon.socket) as checkpointer:
        ticket = checkpointer.save(np.int64(3), wait="durable", metrics={"loss": np.float32(0.5), "nan": np.float64("nan")})
        assert type(ticket.step) is int
        assert checkpointer.restore(np.int32(3)) == 3
        for wrong in (-1, True, 2.0, "2"):
            with pytest.raises(InvalidRequest, match="step"):
                checkpointer.save(wrong)
            with pytest.raises(InvalidRequest, match="step"):
                checkpointer.restore(wrong)
        for value in (True, "0.5", None, np.True_, torch.ones(1)):
            with pytest.raises(InvalidRequest, match="loss"):
                checkpointer.save(4, metrics={"loss": value})
    for run in (5, None, Path("run")):
        with pytest.raises(InvalidRequest, match="run name"):
            Checkpointer(run, {"x": torch.ones(2)}, at=daemon.socket)  # type: ignore[arg-type]


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """What can never be a directory is refused at once; a save says that no daemon can be started, and why."""
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="Not a directory"):
        Checkpointer("r", {"x": torch.ones(2)}, at=tmp_path / "file" / "root")
    checkpointer = Checkpointer("r", {"x": torch.ones(2)}, at="/proc/root-of-holdfast")  # nobody makes directories there
    assert checkpointer.restore() == 0
    with pytest.raises(DaemonGone, match="cannot start an embedded daemon"):
        checkpointer.save(1)
    checkpointer.close()


@pytest.mark.parametrize("older", [True, False])
def test_a_commit_that_is_gone_is_damage_with_no_daemon_too(tmp_path: Path, older: bool) -> None:
    """A step that is complete but for its COMMIT is named, and an older one is taken with a note, never silently."""
    with running(tmp_path / "root") as daemon:
        state = {"x": torch.ones(2)}
        with Checkpointer("r", state, at=daemon.socket) as checkpointer:
            for number in (1, 2) if older else (2,):
                checkpointer.save(number, wait="durable")
    (tmp_path / "root" / naming.checkpoint_path("r", 2) / naming.COMMIT).unlink()
    with Checkpointer("r", {"x": torch.zeros(2)}, at=tmp_path / "root") as checkpointer:
        with pytest.raises(NotCommitted, match="COMMIT"):
            checkpointer.restore(2)
        if older:
            assert checkpointer.restore(groups=["extra"]) == 1
            assert "step 2 is damaged" in checkpointer.notices[0]
        else:
            with pytest.raises(NotCommitted, match="COMMIT"):
                checkpointer.restore(groups=["extra"])


def test_memory_for_what_an_optimizer_will_add_is_no_growth(daemon: RunningDaemon) -> None:
    """A save before the first step, and larger slots for what that step adds: nobody is told that the state has grown."""
    model = nn.Linear(300, 300)
    state = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    with Checkpointer("growth", state, at=daemon.socket) as checkpointer:
        checkpointer.save(1, wait="durable")
        checkpointer.prepare(wait=True)
        assert not [notice for notice in checkpointer.notices if "no longer fits" in notice]

"""A save in one thread while another one is in `optimizer.step()` is refused: the state is half of the next step."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast.read.directory_root import committed_steps
from holdfast_formats.errors import TornSnapshot
from tests.daemons import running


class Halting(torch.optim.SGD):
    """Stands still in the middle of a step until it may go on."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.inside, self.go_on = threading.Event(), threading.Event()

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.inside.set()
        self.go_on.wait()


class Failing(torch.optim.SGD):
    """Its steps raise."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        raise RuntimeError("out of memory")


class StepsMeanwhile:
    """An entry of the state that has the other thread begin a step when it is asked for its values."""

    def __init__(self) -> None:
        self.act = lambda: None

    def state_dict(self) -> dict[str, int]:
        self.act()
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.fixture
def unlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if the stacks of other threads are looked at, which hangs or ends a process now and then in CPython 3.11."""
    monkeypatch.setattr(sys, "_current_frames", lambda: pytest.fail("walks the stacks of other threads"))


@pytest.mark.usefixtures("unlooked")
@pytest.mark.filterwarnings("ignore::holdfast.SaveWarning")
@pytest.mark.parametrize("begins", ["before the save", "while it looks at the state"])
def test_what_another_thread_steps_meanwhile_is_not_saved(begins: str, tmp_path: Path) -> None:
    """Before: some weights of one step and some of the next were committed, without a word."""
    model = torch.nn.Linear(2, 2)
    optimizer, entry = Halting(model), StepsMeanwhile()
    with (
        running(tmp_path / "root") as daemon,
        Checkpointer("run", {"model": model, "optim": optimizer, "entry": entry}, at=daemon.socket) as checkpointer,
    ):
        optimizer.go_on.set()
        optimizer.step()  # the first one prepares the save of a later one
        optimizer.go_on.clear()
        optimizer.inside.clear()
        checkpointer.save(1, wait="durable")
        steps = threading.Thread(target=optimizer.step)

        def step() -> None:
            if steps.ident is None:
                steps.start()
                assert optimizer.inside.wait(180)

        if begins == "before the save":
            step()
        else:
            entry.act = step
        with pytest.raises(TornSnapshot, match=r"another thread called optimizer\.step\(\)"):
            checkpointer.save(2)
        optimizer.go_on.set()
        steps.join()
        checkpointer.save(3, wait="durable")
    assert sorted(committed_steps(tmp_path / "root", "run")) == [1, 3]


@pytest.mark.usefixtures("unlooked")
def test_a_step_that_raised_in_another_thread_refuses_no_save(tmp_path: Path) -> None:
    """No hook runs at its end."""
    model = torch.nn.Linear(2, 2)
    optimizer = Failing(model.parameters(), lr=0.1)
    raised: list[Exception] = []

    def step() -> None:
        try:
            optimizer.step()
        except RuntimeError as error:
            raised.append(error)  # with the frames of the step

    with (
        running(tmp_path / "root") as daemon,
        Checkpointer("run", {"model": model, "optim": optimizer}, at=daemon.socket) as checkpointer,
    ):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        assert [str(error) for error in raised] == ["out of memory"]
        checkpointer.save(1, wait="durable")
    assert sorted(committed_steps(tmp_path / "root", "run")) == [1]

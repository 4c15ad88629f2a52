"""A checkpointer that is closed keeps nothing alive: neither the model nor shared memory waits for Python's collector.

Who trains one model after the other in a process, or has the collector switched off, would run out of memory otherwise.
"""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast import Checkpointer, Ema
from tests.daemons import RunningDaemon, running, wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running(tmp_path_factory.mktemp("closing") / "root") as daemon:
        trained(daemon, "first", 0, None)  # torch's first optimizer of a process keeps the frames that made it
        yield daemon


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def trained(daemon: RunningDaemon, run: str, saves: int, ema: Ema | None) -> list[weakref.ref]:
    """Train and save with a checkpointer of its own; what only weak references are left of."""
    model = nn.Linear(64, 64)
    optim = torch.optim.AdamW(model.parameters())
    with Checkpointer(run, {"model": model, "optim": optim}, at=daemon.socket, ema=ema) as checkpointer:
        for step in range(1, saves + 1):
            model(torch.ones(1, 64)).sum().backward()
            optim.step()
            checkpointer.save(step, wait="durable")
        checkpointer.prepare(wait=True)
    return [weakref.ref(one) for one in (checkpointer, model.weight, optim)]


def mappings(run: str) -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"memfd:holdfast-{run}-" in line]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("run", "saves", "ema"),
    [("unsaved", 0, None), ("saved", 3, None), ("averaged", 2, Ema(decay=0.9, of="model", every=1))],
)
def test_a_closed_checkpointer_keeps_nothing(daemon: RunningDaemon, run: str, saves: int, ema: Ema | None) -> None:
    """The state and the slots are free as soon as nobody else has them; a thread that is just ending may take a moment."""
    left = trained(daemon, run, saves, ema)
    wait_until(lambda: all(one() is None for one in left) and mappings(run) == [])


@pytest.mark.usefixtures("no_collector")
def test_one_that_waited_for_signals_keeps_nothing(daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session calls what waits for signals, and is called by it; neither knows the checkpointer."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HOLDFAST_LAUNCH", "two ranks")
    model = nn.Linear(8, 8)
    with Checkpointer("stopped", {"model": model}, at=daemon.socket) as checkpointer:
        checkpointer.on_preemption((signal.SIGUSR1,))
        assert not checkpointer.should_stop(1)
    left = [weakref.ref(one) for one in (checkpointer, model.weight)]
    del checkpointer, model
    wait_until(lambda: all(one() is None for one in left))


@pytest.mark.usefixtures("no_collector")
def test_a_save_that_is_over_keeps_nothing(daemon: RunningDaemon) -> None:
    """Of saves that have ended no object of ours waits for the collector, while training goes on."""
    model = nn.Linear(64, 64)
    with Checkpointer("on-and-on", {"model": model}, at=daemon.socket) as checkpointer:
        for step in range(1, 4):
            checkpointer.save(step, wait="durable")
        tasks = [one for one in gc.get_objects() if type(one).__name__ in ("SaveTask", "BackgroundCopy", "Sealable")]
        assert len(tasks) <= 3, "the last save's alone"

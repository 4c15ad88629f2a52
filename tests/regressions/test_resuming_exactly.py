"""A training that is resumed draws what the uninterrupted one drew: from Python's, numpy's and torch's streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast import Checkpointer
from holdfast_formats.errors import InvalidRequest
from tests.daemons import RunningDaemon, running

BATCHES = 6


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory):
    """One daemon for all tests of this file; each uses a run of its own."""
    with running(tmp_path_factory.mktemp("resuming") / "root") as daemon:
        yield daemon


class StandIn:
    """Does what torchdata's StatefulDataLoader does: its state comes of an iterator, which is made where there is none.

    An iterator of torch's DataLoader draws a seed when it is made; the order is that of the epoch.
    """

    def __init__(self, data: TensorDataset, workers: int) -> None:
        self._data, self._workers = data, workers
        self._iterator: Any = None
        self._fresh = False
        self._epoch = self._yielded = 0
        self._next: dict[str, int] = {}

    def _make(self) -> None:
        self._epoch, self._yielded = self._next.get("epoch", self._epoch + 1), self._next.get("yielded", 0)
        order = torch.randperm(len(self._data), generator=torch.Generator().manual_seed(self._epoch)).tolist()
        loader = DataLoader(self._data, 2, sampler=order[2 * self._yielded :], num_workers=self._workers)
        self._next, self._iterator = {}, iter(loader)

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self._fresh:
            self._make()
        self._fresh = False
        return self

    def __next__(self) -> torch.Tensor:
        (batch,) = next(self._iterator)
        self._yielded += 1
        return batch

    def state_dict(self) -> dict[str, int]:
        if self._iterator is None:
            self._make()
            self._fresh = True
        return {"epoch": self._epoch, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._iterator, self._fresh, self._next = None, False, dict(state)


def stateful_data_loader(data: TensorDataset, workers: int) -> Any:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    return loaders.StatefulDataLoader(data, 2, shuffle=True, num_workers=workers, collate_fn=stacked)


def stacked(rows: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([row for (row,) in rows])


def losses(daemon: RunningDaemon, run: str, loader: Any, until: int, save_at: int) -> list[tuple[float, float, float]]:
    """The loop of the README: every loss from the restored step on, with what Python and numpy draw beside it."""
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    with Checkpointer(run, {"model": model, "optim": optimizer, "loader": loader}, at=daemon.socket) as checkpointer:
        step = checkpointer.restore()
        while step < until:
            for batch in loader:
                step += 1
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append((loss.item(), random.random(), float(np.random.rand())))
                if step == save_at:
                    checkpointer.save(step, wait="durable")
                if step == until:
                    break
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchdata calls what torch deprecates
@pytest.mark.parametrize("make", [StandIn, stateful_data_loader])
@pytest.mark.parametrize(("workers", "save_at"), [(0, 3), (0, BATCHES), (2, 3), (2, BATCHES)])
def test_losses_are_bit_equal_from_the_first_resumed_step(
    daemon: RunningDaemon, make: Any, workers: int, save_at: int
) -> None:
    """Mid-epoch and at the end of one, with data loaded here or by workers."""
    data = TensorDataset(torch.randn(2 * BATCHES, 4, generator=torch.Generator().manual_seed(1)))
    run, until = f"resumed-{make.__name__}-{workers}-{save_at}", save_at + BATCHES + 2
    whole = losses(daemon, run, make(data, workers), until, save_at)
    resumed = losses(daemon, run, make(data, workers), until, 0)
    assert resumed == whole[save_at:]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchdata calls what torch deprecates
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("listed", [True, False])
def test_a_loader_with_a_generator_of_its_own_has_the_rows_of_the_undisturbed_run(
    daemon: RunningDaemon, workers: int, listed: bool
) -> None:
    """Killed in the middle of an epoch: the rest of this one, and the next ones; listed in the state, and unasked."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    run = f"generator-{workers}-{listed}"

    def made(seed: int) -> dict[str, Any]:
        shuffle = torch.Generator().manual_seed(seed)
        loader = loaders.StatefulDataLoader(list(range(20)), 4, shuffle=True, generator=shuffle, num_workers=workers)
        return {"model": nn.Linear(2, 2), "loader": loader} | ({"shuffle": shuffle} if listed else {})

    whole, rows = made(3), []
    with Checkpointer(run, whole, at=daemon.socket) as checkpointer:
        for _ in range(3):
            for batch in whole["loader"]:
                rows.append(batch.tolist())
                if len(rows) == 2:
                    checkpointer.save(2, wait="durable")
    resumed, again = made(77), rows[:2]
    with Checkpointer(run, resumed, at=daemon.socket) as checkpointer:
        assert checkpointer.restore() == 2
        for _ in range(3):
            again += [batch.tolist() for batch in resumed["loader"]]
    assert again == rows


class Drawing:
    """An object that draws whenever it is asked for its state."""

    def state_dict(self) -> dict[str, float]:
        return {"drawn": random.random() + float(np.random.rand()) + torch.rand(()).item()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        random.random(), np.random.rand(), torch.rand(())


def drawn() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_what_objects_draw_when_they_are_asked_changes_no_stream(daemon: RunningDaemon) -> None:
    """Neither a save nor a restore moves the streams on, whatever the user's objects draw in them."""
    checkpointer = Checkpointer("drawing", {"object": Drawing(), "x": torch.ones(2)}, at=daemon.socket)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    unsaved = drawn()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    checkpointer.save(1, wait="durable")
    assert drawn() == unsaved
    for step in (None, 1):
        assert checkpointer.restore(step) == 1
        assert drawn() == unsaved
    checkpointer.close()


def test_the_streams_can_be_installed_again(daemon: RunningDaemon) -> None:
    """Who draws on the way back into the loop asks for the streams once more; without any it is an error by name."""
    checkpointer = Checkpointer("again", {"x": torch.ones(2)}, at=daemon.socket)
    with pytest.raises(InvalidRequest, match="no random states"):
        checkpointer.restore_random()
    checkpointer.save(1, wait="durable")
    after = drawn()
    checkpointer.restore()
    iter(DataLoader(TensorDataset(torch.ones(4))))
    checkpointer.restore_random()
    assert drawn() == after
    checkpointer.close()

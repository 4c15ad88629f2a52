"""Ranks of one launch at the daemons of several nodes, for tests: in this process, a thread each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from holdfast import Checkpointer, Fragment
from holdfast.launch import Launch, assigned
from holdfast_formats.errors import CheckpointError

ROWS, COLUMNS = 264, 1200
_Made = TypeVar("_Made")


def whole(step: int) -> dict[str, torch.Tensor]:
    """The global tensors of a step."""
    numbers = torch.arange(ROWS * COLUMNS, dtype=torch.float32)
    return {
        "rows": (numbers + step).reshape(ROWS, COLUMNS),
        "columns": (numbers * 2 - step).reshape(ROWS, COLUMNS),
        "flat": numbers[:100_003] - step,
        "alike": torch.full((1000,), float(step)),
    }


def state(rank: int, world: int, step: int | None) -> dict[str, Any]:
    """What a rank holds: rows, columns, a flat range, a replica, and something of its own; zeros without a step."""
    made = whole(step or 0)
    if step is None:
        made = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    low, high = ROWS * rank // world, ROWS * (rank + 1) // world
    left, right = COLUMNS * rank // world, COLUMNS * (rank + 1) // world
    start, stop = 100_003 * rank // world, 100_003 * (rank + 1) // world
    return {
        "model": {
            "rows": Fragment(made["rows"][low:high].clone(), (ROWS, COLUMNS), offset=(low, 0)),
            "columns": Fragment(made["columns"][:, left:right].clone(), (ROWS, COLUMNS), offset=(0, left)),
            "flat": Fragment(made["flat"][start:stop].clone(), (100_003,), flat=(start, stop)),
            "alike": made["alike"].clone(),
        },
        "extra": {"own": torch.full((37,), 0.0 if step is None else float(rank + step))},
    }


class Place(Protocol):
    """A daemon that ranks reach by its socket, or by what stands for it."""

    @property
    def socket(self) -> Path | str: ...


class Ranks:
    """The checkpointers of a launch: rank r is at `places[r]`."""

    def __init__(self, run: str, places: Sequence[Place], name: str, **options: Any) -> None:
        self.run, self.world, self.name = run, len(places), name
        self.states = [state(rank, self.world, None) for rank in range(self.world)]
        self.checkpointers = []
        for rank, daemon in enumerate(places):
            launch = Launch(rank, self.world, name, self.world)
            with assigned(lambda launch=launch: launch):
                self.checkpointers.append(Checkpointer(run, self.states[rank], at=daemon.socket, **options))

    def set(self, step: int) -> None:
        """Give all ranks what they hold at this step, in place."""
        for rank in range(self.world):
            for group, tensors in state(rank, self.world, step).items():
                for name, tensor in tensors.items():
                    mine = self.states[rank][group][name]
                    _plain(mine).copy_(_plain(tensor))

    def save(self, step: int, wait: Literal["staged", "durable"] | None = "durable") -> list[Any]:
        """Save on all ranks at once; their tickets."""
        self.set(step)
        return self.each(lambda rank, one: one.save(step, wait=wait))

    def each(self, act: Callable[[int, Checkpointer], _Made]) -> list[_Made]:
        """Do it on all ranks at the same time; the first error is raised."""
        found: list[Any] = [None] * self.world
        errors: list[BaseException] = []

        def do(rank: int) -> None:
            try:
                found[rank] = act(rank, self.checkpointers[rank])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=do, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        limit = time.monotonic() + 180
        for thread in threads:
            while thread.is_alive() and time.monotonic() < limit:
                thread.join(0.1)
                if errors:  # others may wait for this rank, and for ever
                    limit = min(limit, time.monotonic() + 10)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a rank has not come back"
        return found

    def check(self, step: int) -> None:
        """All ranks hold exactly what they saved at this step."""
        for rank in range(self.world):
            for group, tensors in state(rank, self.world, step).items():
                for name, tensor in tensors.items():
                    assert torch.equal(_plain(self.states[rank][group][name]), _plain(tensor)), (rank, group, name)

    def close(self) -> None:
        self.each(lambda rank, one: one.close())


@contextmanager
def ranks(run: str, places: Sequence[Place], name: str, **options: Any) -> Iterator[Ranks]:
    made = Ranks(run, places, name, **options)
    try:
        yield made
    finally:
        with suppress(CheckpointError):  # of the last save, which the test has looked at
            made.close()


def _plain(tensor: Any) -> torch.Tensor:
    return tensor.tensor if isinstance(tensor, Fragment) else tensor

"""A peer that keeps references where it should copy: what a benchmark that checks nothing would find the fastest of all."""

from __future__ import annotations

from benchmarks.peers import Place
from benchmarks.peers.torch_save import LOADERS, TorchSave
from benchmarks.state import State

__all__ = ["LOADERS", "open_peer"]


class NotStaged(TorchSave):
    """save() returns at once, and what it was given is written after the trainer has gone on."""

    def __init__(self, place: Place, state: State) -> None:
        super().__init__(place, state)
        self._step = 0

    def save(self, step: int) -> None:
        self._step = step

    def wait(self) -> None:
        super().save(self._step)


class Late(NotStaged):
    """The fence keeps the trainer waiting as it should, and everything is right."""

    def fence(self) -> None:
        super().wait()

    def wait(self) -> None:
        """It was complete when the fence opened."""


def open_peer(place: Place, state: State, variant: str) -> NotStaged:
    return {"": NotStaged, "fenced": Late}[variant](place, state)

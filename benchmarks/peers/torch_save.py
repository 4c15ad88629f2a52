"""torch.save of each rank's tensors into a file of its own, synced; blocks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from benchmarks.state import State

from . import Place


def file_of(place: Place, step: int, rank: int, suffix: str) -> Path:
    return place.directory / f"step-{step}" / f"rank-{rank}.{suffix}"


def sync_file(path: Path) -> None:
    """The file, and the directories that name it."""
    for each in (path, path.parent, path.parent.parent):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class TorchSave:
    def __init__(self, place: Place, state: State) -> None:
        self._place, self._state = place, state

    def save(self, step: int) -> None:
        path = file_of(self._place, step, self._state.rank, "pt")
        path.parent.mkdir(exist_ok=True)
        torch.save(self._state.tensors, path)
        sync_file(path)

    def fence(self) -> None:
        """Nothing is read after save() has returned."""

    def wait(self) -> None:
        """It was complete when save() returned."""

    def clear(self, step: int) -> None:
        shutil.rmtree(self._place.directory / f"step-{step}")


def open_peer(place: Place, state: State, variant: str) -> TorchSave:
    return TorchSave(place, state)


def load(place: Place, state: State, step: int) -> None:
    found = torch.load(file_of(place, step, state.rank, "pt"), mmap=True, weights_only=True)
    for name, tensor in state.tensors.items():
        tensor.copy_(found[name])


LOADERS = {"torch.load, mmap": load}

"""Holdfast through its public API; the daemon is started by `holdfast serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers.holdfast import RUN, entries
from benchmarks.state import State
from holdfast import Checkpointer


class Holdfast:
    """`save()` with its default, or with `wait="staged"`."""

    def __init__(self, directory: Path, state: State, variant: str) -> None:
        self._staged = variant == "staged"
        self._checkpointer = Checkpointer(RUN, entries(state), at=directory, fenced=True)
        self._ticket: Any = None

    def save(self, step: int) -> None:
        self._ticket = self._checkpointer.save(step, wait="staged" if self._staged else None)

    def wait(self) -> None:
        self._ticket.result()

    def close(self) -> None:
        self._checkpointer.close()

    def resume(self) -> int:
        return self._checkpointer.restore()

    def load(self, step: int) -> None:
        self._checkpointer.restore(step)


def open_peer(directory: Path, state: State, variant: str) -> Holdfast:
    return Holdfast(directory, state, variant)

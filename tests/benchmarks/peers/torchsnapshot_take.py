"""torchsnapshot's Snapshot.async_take: staged when it returns, written in the background."""

from __future__ import annotations

import shutil
from typing import Any

from torchsnapshot import Snapshot, StateDict

from tests.benchmarks.state import State

from . import Place

KEY = "state"


class TorchSnapshot:
    def __init__(self, place: Place, state: State) -> None:
        self._place = place
        self._app = {KEY: StateDict(**state.tensors)}
        self._pending: Any = None

    def save(self, step: int) -> None:
        self._pending = Snapshot.async_take(str(self._place.directory / f"step-{step}"), self._app)

    def fence(self) -> None:
        """async_take returns when everything is staged."""

    def wait(self) -> None:
        self._pending.wait()

    def clear(self, step: int) -> None:
        shutil.rmtree(self._place.directory / f"step-{step}")


def open_peer(place: Place, state: State, variant: str) -> TorchSnapshot:
    return TorchSnapshot(place, state)


def load(place: Place, state: State, step: int) -> None:
    Snapshot(str(place.directory / f"step-{step}")).restore({KEY: StateDict(**state.tensors)})


LOADERS = {"torchsnapshot restore": load}

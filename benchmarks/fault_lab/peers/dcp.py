"""torch.distributed.checkpoint: a directory a step. As in torchtitan the newest with a `.metadata` is resumed from."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from benchmarks.state import State

METADATA = ".metadata"


class Dcp:
    """`save` or `async_save` with its defaults."""

    def __init__(self, directory: Path, state: State, variant: str) -> None:
        self._directory, self._state, self._variant = directory, state, variant
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        if self._variant == "sync":
            dcp.save(dict(self._state.tensors), checkpoint_id=self._where(step))
            return
        answer = dcp.async_save(dict(self._state.tensors), checkpoint_id=self._where(step))
        self._written = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        """Nothing is held."""

    def resume(self) -> int:
        complete = [path.parent for path in self._directory.glob(f"step-*/{METADATA}")]
        steps = [int(path.name.partition("-")[2]) for path in complete]
        if not steps:
            return 0
        self.load(max(steps))
        return max(steps)

    def load(self, step: int) -> None:
        dcp.load(dict(self._state.tensors), checkpoint_id=self._where(step))

    def _where(self, step: int) -> Path:
        return self._directory / f"step-{step}"


def open_peer(directory: Path, state: State, variant: str) -> Dcp:
    return Dcp(directory, state, variant)

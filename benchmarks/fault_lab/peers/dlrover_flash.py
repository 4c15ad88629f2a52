"""DLRover's flash checkpoint. Its agent (`fault_lab/dlrover_agent.py`) lives beside the trainer, as under `dlrover-run`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from dlrover.python.common.constants import CheckpointConstant
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

from benchmarks.state import State

POLL_S = 0.005
WAIT_S = 20.0
STEP = "step"


class DlroverFlash:
    """Its own `wait_latest_checkpoint` looks every three seconds; here its tracker file is looked at more often."""

    def __init__(self, directory: Path, state: State) -> None:
        os.environ["ROLE_NAME"] = "dlrover-trainer"  # by which DLRover knows that an agent is there
        self._directory, self._state = directory, state
        self._step = 0
        self._checkpointer = DdpCheckpointer(str(directory), local_shard_num=1, global_shard_num=1, comm_backend="gloo")

    def save(self, step: int) -> None:
        self._step = step
        self._checkpointer.save_checkpoint(
            step, {"model": dict(self._state.tensors), STEP: step}, storage_type=StorageType.DISK
        )
        if self._checkpointer._engine.latest_step != step:
            raise RuntimeError(f"step {step} was skipped: the save before it is still being written")

    def wait(self) -> None:
        tracker = self._directory / CheckpointConstant.TRACER_FILE_NAME
        limit = time.monotonic() + WAIT_S
        while not (tracker.exists() and tracker.read_text() == str(self._step)):
            if time.monotonic() > limit:
                raise TimeoutError(f"step {self._step} was not written in {WAIT_S:.0f} s, and nothing says why")
            time.sleep(POLL_S)

    def close(self) -> None:
        self._checkpointer._engine.close()

    def resume(self) -> int:
        return self._take(self._checkpointer.load_checkpoint())

    def load(self, step: int) -> None:
        self._take(self._checkpointer.load_checkpoint(str(self._directory / str(step) / "rank_0.pt")))

    def _take(self, found: dict[str, Any]) -> int:
        if not found:
            return 0
        for name, tensor in self._state.tensors.items():
            tensor.copy_(found["model"][name])
        return int(found[STEP])


def open_peer(directory: Path, state: State, variant: str) -> DlroverFlash:
    return DlroverFlash(directory, state)

"""DLRover's flash checkpoint: copied into shared memory by the trainer, written by a saver process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from pathlib import Path

import torch
from dlrover.python.common.constants import CheckpointConstant
from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover.trainer.torch.flash_checkpoint.engine import start_async_save

from benchmarks.state import State

from . import Peer, Place

POLL_S = 0.005
WAIT_S = 240.0


def file_of(place: Place, step: int, rank: int) -> Path:
    return place.directory / str(step) / f"rank_{rank}.pt"


class DlroverFlash:
    """Its own `wait_latest_checkpoint` looks every three seconds; here its tracker file is looked at more often."""

    def __init__(self, place: Place, state: State) -> None:
        self._place, self._state = place, state
        self._step = 0
        self.checkpointer = DdpCheckpointer(
            str(place.directory), local_shard_num=state.world, global_shard_num=state.world, comm_backend="gloo"
        )

    def save(self, step: int) -> None:
        self._step = step
        self.checkpointer.save_checkpoint(step, dict(self._state.tensors), storage_type=StorageType.DISK)
        if self.checkpointer._engine.latest_step != step:
            raise RuntimeError(f"step {step} was skipped: the save before it is still being written")

    def fence(self) -> None:
        """save_checkpoint returns when everything is in shared memory."""

    def wait(self) -> None:
        tracker = self._place.directory / CheckpointConstant.TRACER_FILE_NAME
        limit = time.monotonic() + WAIT_S
        while not (tracker.exists() and tracker.read_text() == str(self._step)):
            if time.monotonic() > limit:
                raise TimeoutError(f"step {self._step} was not written in {WAIT_S:.0f} s")
            time.sleep(POLL_S)

    def clear(self, step: int) -> None:
        shutil.rmtree(self._place.directory / str(step))


def open_peer(place: Place, state: State, variant: str) -> DlroverFlash:
    """The saver in a new process, as under `dlrover-run`: forked from a trainer that has threads, it was seen to hang."""
    os.environ["ROLE_NAME"] = "dlrover-trainer"  # by which DLRover knows that a saver is there
    if state.rank == 0:
        multiprocessing.get_context("spawn").Process(target=start_async_save, daemon=True).start()
    return DlroverFlash(place, state)


def load(place: Place, state: State, step: int) -> None:
    found = torch.load(file_of(place, step, state.rank), map_location="cpu", weights_only=True)
    for name, tensor in state.tensors.items():
        tensor.copy_(found[name])


def load_held(peer: Peer, state: State) -> None:
    assert isinstance(peer, DlroverFlash)
    found = peer.checkpointer.load_checkpoint()
    for name, tensor in state.tensors.items():
        tensor.copy_(found[name])


LOADERS = {"DLRover, torch.load": load}

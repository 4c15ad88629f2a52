"""torch_checkpointing's CheckpointManager: staged by a thread into shared memory, written by a process."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from typing import Any

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from benchmarks.state import State

from . import Place

ITEM = "state"


def manager(saves: bool) -> CheckpointManager:
    """As its documentation says for machines without a GPU.

    Two of its features do not work here, in 0.1.1: direct I/O, which writes from unaligned memory and is refused by ext4 and
    XFS; and resharding, which gathers its metadata on CUDA. So each rank saves and loads its own tensors, buffered.
    """
    has_cuda = torch.cuda.is_available()
    staging = CheckpointStagerConfig(use_pinned_memory=has_cuda, use_non_blocking_copy=has_cuda)
    save = AsyncCheckpointSaverConfig(staging_config=staging) if saves else SyncCheckpointSaverConfig()
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(CheckpointManager.Config(save=save, storage_config=storage))


class TorchCheckpointing:
    """Its staging memory is allocated beforehand by its own `prewarm_staging`."""

    def __init__(self, place: Place, state: State) -> None:
        self._place = place
        self._payload = {ITEM: dict(state.tensors)}
        self._manager = manager(saves=True)
        self._manager.prewarm_staging(self._payload)
        self._written: Future[Any] | None = None

    def save(self, step: int) -> None:
        self._written = self._manager.save(str(self._place.directory / f"step-{step}"), self._payload)

    def fence(self) -> None:
        with self._manager.lock():
            return

    def wait(self) -> None:
        assert self._written is not None
        self._written.result()

    def clear(self, step: int) -> None:
        shutil.rmtree(self._place.directory / f"step-{step}")


def open_peer(place: Place, state: State, variant: str) -> TorchCheckpointing:
    return TorchCheckpointing(place, state)


def load(place: Place, state: State, step: int) -> None:
    manager(saves=False).load(str(place.directory / f"step-{step}"), into={ITEM: dict(state.tensors)})


LOADERS = {"torch_checkpointing load": load}

"""torch.distributed.checkpoint: save, and async_save from a process with a stager that is kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from benchmarks.state import State

from . import Place
from .shards import as_global


def directory_of(place: Place, step: int) -> Path:
    return place.directory / f"step-{step}"


class Dcp:
    """Files are synced by DCP's own writer, which is its default."""

    def __init__(self, place: Place, state: State, variant: str) -> None:
        self._place = place
        self._tensors = as_global(state)
        self._staged: Future[Any] | None = None
        self._written: Future[Any] | None = None
        # Pinned memory and copies that do not block need an accelerator.
        has_device = torch.accelerator.is_available()
        options = StagingOptions(
            use_pinned_memory=has_device,
            use_shared_memory=True,
            use_async_staging=True,
            use_non_blocking_copy=has_device,
        )
        self._stager = None if variant == "sync" else DefaultStager(options)

    def save(self, step: int) -> None:
        where = directory_of(self._place, step)
        if self._stager is None:
            dcp.save(self._tensors, checkpoint_id=where)
            return
        kind = AsyncCheckpointerType.PROCESS
        answer = dcp.async_save(self._tensors, checkpoint_id=where, async_checkpointer_type=kind, async_stager=self._stager)
        if isinstance(answer, AsyncSaveResponse):
            self._staged, self._written = answer.staging_completion, answer.upload_completion
        else:
            self._staged, self._written = None, answer

    def fence(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def wait(self) -> None:
        if self._written is not None:
            self._written.result()

    def clear(self, step: int) -> None:
        shutil.rmtree(directory_of(self._place, step))


def open_peer(place: Place, state: State, variant: str) -> Dcp:
    return Dcp(place, state, variant)


def load(place: Place, state: State, step: int) -> None:
    dcp.load(as_global(state), checkpoint_id=directory_of(place, step))


LOADERS: dict[str, Callable[[Place, State, int], None]] = {"dcp.load": load}
RESHARDERS = LOADERS

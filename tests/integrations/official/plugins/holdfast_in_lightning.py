"""Puts Holdfast in the place of Lightning's callback and its CheckpointIO, a pytest plugin. Each test has its own run."""

from __future__ import annotations

import inspect
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch.trainer.connectors.callback_connector as connector
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from holdfast.integrations.lightning import HoldfastCheckpoint, HoldfastCheckpointIO, contents, load_from_checkpoint

AT = os.environ["HOLDFAST_OFFICIAL"]
NO_GIT = {"git": None}  # it is asked in a thread, which a slow machine lets outlive a short test
_OF_FILES = ("map_location", "hparams_file", "weights_only")
_own_isfile = os.path.isfile
_own_load = LightningModule.__dict__["load_from_checkpoint"]
_runs = ["no-test"]


class ModelCheckpoint(HoldfastCheckpoint):
    """Takes the arguments as ModelCheckpoint does, three of them by position; its name is in the keys of states."""

    __signature__ = inspect.signature(HoldfastCheckpoint, eval_str=True)  # a test reads a type there

    def __init__(self, dirpath: Any = None, filename: Any = None, monitor: Any = None, **options: Any) -> None:
        super().__init__(_runs[-1], at=AT, info=NO_GIT, dirpath=dirpath, filename=filename, monitor=monitor, **options)


class CheckpointIO(HoldfastCheckpointIO):
    """Takes no arguments."""

    def __init__(self) -> None:
        super().__init__(_runs[-1], at=AT, info=NO_GIT)


def load(kind: Any, checkpoint_path: Any, *given: Any, **options: Any) -> Any:
    """`load_from_checkpoint` as docs/integrations/lightning.md has it; files of Lightning are loaded by Lightning."""
    if not isinstance(checkpoint_path, str | os.PathLike) or not contents.is_checkpoint(checkpoint_path):
        return _own_load.__get__(None, kind)(checkpoint_path, *given, **options)
    kept = {name: value for name, value in options.items() if name not in _OF_FILES}
    return load_from_checkpoint(kind, checkpoint_path, **kept)


def reads(own: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` for tests that look into a checkpoint: what Lightning reads from a file, but the optimizers."""

    def load_file(place: Any, *given: Any, **options: Any) -> Any:
        if isinstance(place, str | os.PathLike) and contents.is_checkpoint(place):
            return contents.stored_dictionary(place)
        return own(place, *given, **options)

    return load_file


def isfile(path: Any) -> bool:
    """A test that looks for a file finds the checkpoint. All other code sees the directory that it is."""
    of_test = sys._getframe(1).f_globals.get("__name__", "").rpartition(".")[2].startswith("test_")
    return _own_isfile(path) or (of_test and contents.is_checkpoint(path))


@pytest.fixture(autouse=True)
def holdfast_instead(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace the names that the test's module has imported, and what a Trainer makes by itself."""
    _runs.append(f"test-{zlib.crc32(request.node.nodeid.encode()):08x}")
    with pytest.MonkeyPatch.context() as patch:  # of its own: the test's is undone before Lightning looks for what is left
        if hasattr(request.module, "CustomCheckpointIO"):
            patch.setattr(request.module, "CustomCheckpointIO", CheckpointIO)
            if request.node.name == "test_async_checkpoint_plugin":
                patch.setattr(request.module, "AsyncCheckpointIO", lambda: AsyncCheckpointIO(CheckpointIO()))
        else:
            _replace(request.module, patch)
        yield


def _replace(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os.path, "isfile", isfile)
    patch.setattr(torch, "load", reads(torch.load))
    patch.setattr(LightningModule, "load_from_checkpoint", classmethod(load))
    patch.setattr(connector, "ModelCheckpoint", ModelCheckpoint)
    if hasattr(module, "ModelCheckpoint"):
        patch.setattr(module, "ModelCheckpoint", ModelCheckpoint)
    if hasattr(module, "pl_load"):  # Lightning's own torch.load
        patch.setattr(module, "pl_load", reads(module.pl_load))

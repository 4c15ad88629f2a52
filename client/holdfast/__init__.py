"""Holdfast for trainers: hand over the training state, go on training, get it back on any layout.

    from holdfast import Checkpointer

    with Checkpointer("llama3-8b", {"model": model, "optim": optimizer}) as checkpointer:
        for step in range(checkpointer.restore() + 1, steps + 1):
            train(step)
            if step % 500 == 0:
                checkpointer.save(step)

torch is imported only when a name that needs it is used, so that the command line starts without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.memory import gc_pause
from holdfast_formats.errors import CheckpointError

if TYPE_CHECKING:
    from holdfast.layout.rules_choice import ParallelLayout
    from holdfast.read.reader import CheckpointReader
    from holdfast.rest.api import Api
    from holdfast.restore.load import RestoreReport
    from holdfast.stage.averaging import Ema
    from holdfast.state.named import Named
    from holdfast.state.optimizer_shards import OptimizerShards
    from holdfast.tensors.fragments import Fragment
    from holdfast.tensors.registered import register_class

    from .checkpoint import Checkpoint, open
    from .checkpointer import Checkpointer
    from .left_out import LeftOutWarning
    from .save_warning import SaveWarning
    from .tickets import SaveResult, SaveTicket

__version__ = "0.1.0"
__all__ = [
    "Api",
    "Checkpoint",
    "CheckpointError",
    "CheckpointReader",
    "Checkpointer",
    "Ema",
    "Fragment",
    "LeftOutWarning",
    "Named",
    "OptimizerShards",
    "ParallelLayout",
    "RestoreReport",
    "SaveResult",
    "SaveTicket",
    "SaveWarning",
    "__version__",
    "open",
    "register_class",
]
_HOME = {
    "Api": "rest.api",
    "Checkpoint": "checkpoint",
    "CheckpointReader": "read.reader",
    "Checkpointer": "checkpointer",
    "Ema": "stage.averaging",
    "Fragment": "tensors.fragments",
    "LeftOutWarning": "left_out",
    "Named": "state.named",
    "OptimizerShards": "state.optimizer_shards",
    "ParallelLayout": "layout.rules_choice",
    "RestoreReport": "restore.load",
    "SaveResult": "tickets",
    "SaveTicket": "tickets",
    "SaveWarning": "save_warning",
    "open": "checkpoint",
    "register_class": "tensors.registered",
}


def __dir__() -> list[str]:
    return sorted(__all__)  # also names whose module is not imported yet


def __getattr__(name: str) -> Any:
    if name in _HOME:
        with gc_pause.paused():  # torch has made many objects, and each collection looks at all of them
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

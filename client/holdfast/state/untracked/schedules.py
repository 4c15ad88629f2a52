"""Notes a learning-rate scheduler that changes an optimizer of the state but is not in the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast.left_out import LeftOutNote
from holdfast.state import optimizer_wrappers

_OTHERS = (nn.Module, torch.amp.GradScaler, DataLoader)
_MARK = "_wrapped_by_lr_sched"  # torch's, on the step() of an optimizer that has a scheduler


def notes_of(state: Mapping[str, Any]) -> Iterator[LeftOutNote]:
    optimizers = {key: value for key, value in state.items() if optimizer_wrappers.is_optimizer(value)}
    if any(_may_be_schedule(value) for key, value in state.items() if key not in optimizers):
        return
    for key, value in optimizers.items():
        if any(hasattr(inner.step, _MARK) for inner in optimizer_wrappers.find(value).optimizers):
            yield LeftOutNote(
                f"not saved: the learning-rate scheduler of {key}, which would start from the beginning after a restore: "
                'write state["scheduler"] = scheduler'
            )


def _may_be_schedule(value: object) -> bool:
    """Whether an entry is a scheduler, or an object of a framework or of the user's, which may contain one."""
    stateful = all(callable(getattr(type(value), name, None)) for name in ("state_dict", "load_state_dict"))
    return stateful and not isinstance(value, _OTHERS)

"""Notes a gradient scaler that scales the steps of the state's optimizers and is not in the state."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from holdfast.left_out import LeftOutNote
from holdfast.state.untracked.other_optimizers import may_hold_one

FRAMES_MAX = 48  # callers that are looked at


class Scalers:
    """Every gradient scaler of torch by which an optimizer of the state has taken a step, as long as it lives."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._stepped: weakref.WeakKeyDictionary[torch.amp.GradScaler, str] = weakref.WeakKeyDictionary()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the scaler that takes this step. torch has no hook for it, so its method is looked for in the stack."""
        scaler = caller({torch.amp.GradScaler.step.__code__})
        if scaler is not None and scaler.is_enabled():
            self._stepped[scaler] = type(optimizer).__name__

    def notes(self) -> Iterator[LeftOutNote]:
        """Of each that would be lost."""
        values = list(self._state.values())
        others = [kind for scaler, kind in list(self._stepped.items()) if not any(scaler is value for value in values)]
        if others and not any(map(may_hold_one, values)):
            yield LeftOutNote(f'{left_out(others[0])}: write state["scaler"] = scaler')


def left_out(kind: str) -> str:
    """That the scaler of an optimizer of this class is not saved."""
    return f"not saved: the GradScaler that steps the {kind}, whose scale would start from the beginning after a restore"


def caller(codes: Collection[CodeType]) -> Any:
    """The object in whose method this is called, one of these; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        if frame is None:
            break
        if frame.f_code in codes:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None

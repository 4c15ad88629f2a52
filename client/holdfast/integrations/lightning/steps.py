"""The steps of a Trainer's optimizers, counted as they are made: Lightning counts one some time later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class OptimizerSteps:
    """Whether an optimizer is in its step, and how many steps all of them have `taken`; a signal may come at any moment."""

    def __init__(self) -> None:
        self.taken, self.running = 0, False
        self._hooks: list[Any] = []

    def watch(self, optimizers: Iterable[Any]) -> None:
        """Count the steps of these, which may be wrapped."""
        for optimizer in optimizers:
            inner = getattr(optimizer, "optimizer", optimizer)
            if isinstance(inner, torch.optim.Optimizer):
                self._hooks.append(inner.register_step_pre_hook(self._begins))
                self._hooks.append(inner.register_step_post_hook(self._ends))

    def leave(self) -> None:
        """Count no more."""
        while self._hooks:
            self._hooks.pop().remove()

    def _begins(self, *_: Any) -> None:
        self.running = True

    def _ends(self, *_: Any) -> None:
        self.running = False
        self.taken += 1

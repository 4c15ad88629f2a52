"""Counts optimizer steps as they happen: Lightning's own count lags behind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from holdfast.threads.reentrancy import is_stepping


class OptimizerSteps:
    """How many steps all optimizers have `taken`, and whether one is running. Signal-safe.

    `torn`: the newest step ended with an exception while it wrote weights, or is writing them now.
    """

    def __init__(self) -> None:
        self.taken, self.torn = 0, False
        self._optimizers: list[torch.optim.Optimizer] = []
        self._hooks: list[Any] = []

    @property
    def running(self) -> bool:
        """Whether this thread is in one of their steps, in which Lightning also calls `training_step`."""
        return self.torn or is_stepping(self._optimizers)

    def watch(self, optimizers: Iterable[Any]) -> None:
        """Count the steps of these optimizers, which may be wrapped."""
        inner = [getattr(one, "optimizer", one) for one in optimizers]
        self._optimizers = [one for one in inner if isinstance(one, torch.optim.Optimizer)]
        self._hooks = [one.register_step_post_hook(self._ends) for one in self._optimizers]

    def leave(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def writes(self) -> None:
        """Gradients are ready: an optimizer writes weights next."""
        self.torn = True

    def _ends(self, *_: Any) -> None:
        self.torn = False
        self.taken += 1

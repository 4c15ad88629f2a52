"""Numbers of steps that a Paddle optimizer has taken, which it keeps as powers of beta alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.integrations.paddle.beta_powers import StepRange


class _Step(NamedTuple):
    """A number of steps as it is stored, and in the same memory as numpy reads it, which is faster."""

    tensor: torch.Tensor
    value: NDArray[np.float32]


class StepCounts:
    """By parameter, the number of steps as it is stored. Where the powers no longer tell it, steps are counted on."""

    def __init__(self) -> None:
        self._steps: dict[str, _Step] = {}
        self._known: dict[str, tuple[int, int]] = {}  # and how many steps the optimizer had taken by then
        self._taken = 0

    def count(self) -> None:
        """The optimizer has taken a step."""
        self._taken += 1

    def restored(self, name: str, steps: int) -> None:
        self._known[name] = steps, self._taken

    def known(self, name: str) -> torch.Tensor | None:
        """The number that was stored or restored last."""
        return self._steps[name].tensor if name in self._steps else None

    def stored(self, name: str, told: StepRange) -> torch.Tensor:
        """The number of steps, of those that the powers tell: a tensor without dimensions, in float32."""
        steps = told.first
        if told.open and name in self._known:
            before, taken = self._known[name]
            steps = max(steps, before + self._taken - taken)
        self._known[name] = steps, self._taken
        if name not in self._steps:
            tensor = torch.zeros((), dtype=torch.float32)
            self._steps[name] = _Step(tensor, tensor.numpy())
        self._steps[name].value[()] = steps
        return self._steps[name].tensor

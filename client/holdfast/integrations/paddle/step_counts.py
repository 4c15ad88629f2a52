"""Numbers of steps that a Paddle optimizer has taken, which it keeps as powers of beta alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.integrations.paddle.beta_powers import StepRange

Numbers = NDArray[np.float32]


class _Step(NamedTuple):
    """A number of steps as it is stored, and in the same memory as numpy reads it, which is faster."""

    tensor: torch.Tensor
    value: Numbers


class _Known(NamedTuple):
    """A number of steps, and how many steps the optimizer had taken by then."""

    steps: int
    taken: int


class StepCounts:
    """By parameter, the number of steps as it is stored. Where the powers no longer tell it, steps are counted on."""

    def __init__(self) -> None:
        self._steps: dict[str, _Step] = {}
        self._known: dict[str, _Known] = {}
        self._alike: dict[tuple[str, ...], _Known] = {}  # later than `_known`, of parameters that were stored together
        self._together: dict[tuple[str, ...], Numbers] = {}  # numbers that are one after the other in memory
        self._taken = 0

    def count(self) -> None:
        """The optimizer has taken a step."""
        self._taken += 1

    def restored(self, name: str, steps: int) -> None:
        self._tell_apart()
        self._known[name] = _Known(steps, self._taken)

    def known(self, name: str) -> torch.Tensor | None:
        """The number that was stored or restored last."""
        return self._steps[name].tensor if name in self._steps else None

    def store(self, names: tuple[str, ...], told: Sequence[StepRange]) -> None:
        """Bring the numbers of these parameters up to date, of those that the powers of each tell."""
        alike = len(set(told)) == 1 and not told[0].open
        if alike and names in self._together:
            self._together[names][:] = told[0].first
            self._alike[names] = _Known(told[0].first, self._taken)
            return
        self._tell_apart()
        self._make(names)
        for name, one in zip(names, told, strict=True):
            steps = one.first
            if one.open and name in self._known:
                before = self._known[name]
                steps = max(steps, before.steps + self._taken - before.taken)
            self._known[name] = _Known(steps, self._taken)
            self._steps[name].value[()] = steps

    def stored(self, name: str) -> torch.Tensor:
        """The number of steps: a tensor without dimensions, in float32, the identical one each time."""
        return self._steps[name].tensor

    def _make(self, names: tuple[str, ...]) -> None:
        new = tuple(name for name in names if name not in self._steps)
        if new:
            made = torch.zeros(len(new), dtype=torch.float32)
            numbers = self._together[new] = made.numpy()
            self._steps |= {name: _Step(made[at], numbers[at : at + 1].reshape(())) for at, name in enumerate(new)}

    def _tell_apart(self) -> None:
        for names, known in self._alike.items():
            self._known |= dict.fromkeys(names, known)
        self._alike = {}

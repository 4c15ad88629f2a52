"""Holds up the steps of a Paddle optimizer until the last save has copied what they change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from holdfast.integrations.paddle.gradients import WatchedGradients
from holdfast.integrations.replaced_method import ReplacedMethod

# Each of them ends in the last, which the optimizers of fleet call directly.
STEPS = ("step", "minimize", "apply_gradients", "_apply_optimize")
_ATTRIBUTE = "_holdfast_fence"


class StepFence(torch.optim.Optimizer):
    """A torch optimizer whose step is the step of a Paddle optimizer, by whichever method the training takes it.

    So the hooks that a Checkpointer registers run around each step. It has no parameters; in their place are one that tells
    of Paddle's gradients, and tensors without memory from which a Checkpointer estimates how much the first step will add.
    """

    compiled = False  # torch.compile never sees its step

    def __init__(self, optimizer: Any) -> None:
        self._watched = WatchedGradients.of(optimizer)
        super().__init__([self._watched], {})
        self._inside = False
        self.given: frozenset[str] = frozenset()  # as `tell` said, read by the core's hyper_parameters
        for name in STEPS:
            own = getattr(optimizer, name, None)
            if callable(own):
                setattr(optimizer, name, ReplacedMethod(own, partial(self._outermost, own)))
        setattr(optimizer, _ATTRIBUTE, self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the group. torch's own method loads its compiler."""
        self.param_groups.append(param_group)

    def tell(self, given: Iterable[str]) -> None:
        """The names of the hyper-parameters that the optimizer's user gives, and no scheduler moves."""
        self.given = frozenset(given)

    def expect(self, elements: Sequence[int]) -> None:
        """The next step will make two float32 tensors of so many elements for each of these parameters."""
        if [one.numel() for one in self.param_groups[0]["params"]] != [0, *elements]:
            self.param_groups[0]["params"] = [
                self._watched,
                *(torch.empty(count, dtype=torch.float32, device="meta", requires_grad=True) for count in elements),
            ]

    def step(self, own: Callable[..., Any], *given: Any, **named: Any) -> Any:  # type: ignore[override]
        """Take a step of the Paddle optimizer by its own method."""
        return own(*given, **named)

    def _outermost(self, own: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self._inside:
            return own(*given, **named)
        self._inside = True
        try:
            return self.step(own, *given, **named)
        finally:
            self._inside = False


def fence_of(optimizer: Any) -> StepFence:
    """The fence of this Paddle optimizer, the same for every caller."""
    known = vars(optimizer).get(_ATTRIBUTE)
    return known if isinstance(known, StepFence) else StepFence(optimizer)

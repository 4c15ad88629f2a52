"""Finds gradients that were accumulated since the last optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from holdfast.state.modules import is_tensors
from holdfast.state.optimizer_wrappers import innermost
from holdfast.state.untracked.buffers import version

SAMPLED = 8  # number of parameters of an optimizer whose gradients are watched: the smallest


class _Sample(NamedTuple):
    """A gradient after the last step: the tensor and its version."""

    parameter: torch.Tensor
    gradient: TensorWeakRef | None
    version: int


class Gradients:
    """Whether gradients were computed since the last step of the optimizers, by those of their smallest parameters."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._after: dict[int, list[_Sample]] = {}
        self.restored()

    def restored(self) -> None:
        """Present gradients do not belong to the restored training."""
        for optimizer in innermost(self._state):
            self.stepped(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record an optimizer's gradients, which it has used."""
        before = self._after.get(id(optimizer))
        chosen = _smallest(optimizer) if before is None else [one.parameter for one in before]
        self._after[id(optimizer)] = [_sample(parameter) for parameter in chosen]

    def accumulated(self) -> bool:
        """Whether every optimizer with gradients got them after its last step: another one's step may leave some."""
        seen = []
        for optimizer in innermost(self._state):
            now = [one for one in self._after.get(id(optimizer), ()) if one.parameter.grad is not None]
            if now:
                seen.append(any(map(_has_come, now)))
        return bool(seen) and all(seen) and not self._are_in_the_state()

    def _are_in_the_state(self) -> bool:
        sampled = {id(one.parameter.grad) for kept in self._after.values() for one in kept}
        mappings = [value for value in self._state.values() if is_tensors(value)]
        return any(id(tensor) in sampled for mapping in mappings for tensor in mapping.values())


def _smallest(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    trained = (tensor for group in optimizer.param_groups for tensor in group["params"] if tensor.requires_grad)
    return nsmallest(SAMPLED, trained, key=lambda tensor: tensor.numel())


def _sample(parameter: torch.Tensor) -> _Sample:
    gradient = parameter.grad
    if gradient is None:
        return _Sample(parameter, None, 0)
    return _Sample(parameter, TensorWeakRef(gradient), version(gradient))


def _has_come(one: _Sample) -> bool:
    """Whether a gradient was computed since. One that was only zeroed does not count; a device is not synchronised
    for that.
    """
    now = one.parameter.grad
    if now is None:
        return False
    if one.gradient is None or one.gradient() is not now:
        return True
    since = version(now) - one.version
    if since <= 0:
        return False
    return bool(now.any()) if now.device.type == "cpu" and not now.is_sparse else since > 1

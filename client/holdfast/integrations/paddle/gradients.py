"""The gradients of a Paddle optimizer's parameters, as torch's Checkpointer looks for them: as `.grad` of a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from typing import Any

import torch

from holdfast.integrations.paddle.contents import COMPARED_MAX, TensorContents, contents_of, size_of

SAMPLED = 8  # parameters whose gradients are watched: the smallest


class WatchedGradients(torch.Tensor):
    """A parameter without elements. Its gradient is the identical tensor as long as Paddle's gradients are the same, and
    None if there are none or they are zero.
    """

    _optimizer: Any
    _chosen: list[Any]
    _seen: list[TensorContents]
    _stands_for: torch.Tensor

    @staticmethod
    def of(optimizer: Any) -> WatchedGradients:
        made: WatchedGradients = torch.Tensor._make_subclass(WatchedGradients, torch.empty(0), True)
        made._optimizer, made._chosen, made._seen, made._stands_for = optimizer, [], [], torch.empty(0)
        return made

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        if not self._chosen:
            trained = [one for one in _parameters(self._optimizer) if not one.stop_gradient]
            known = [one for one in trained if size_of(one) <= COMPARED_MAX]  # of others nothing tells that they are zero
            self._chosen = nsmallest(SAMPLED, known or trained, key=size_of)
        now = [gradient for gradient in map(_gradient, self._chosen) if gradient is not None]
        if len(now) != len(self._seen) or not all(map(TensorContents.is_of, self._seen, now)):
            self._seen, self._stands_for = list(map(contents_of, now)), torch.empty(0)
        return None if all(one.zero for one in self._seen) else self._stands_for


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer._param_groups:
        yield from group["params"] if isinstance(group, dict) else (group,)


def _gradient(parameter: Any) -> Any:
    """A parameter's dense gradient; `main_grad` is the one that training in half precision sums up in float32."""
    gradient = getattr(parameter, "main_grad", None)
    gradient = parameter.grad if gradient is None else gradient
    return gradient if gradient is not None and gradient.is_dense() and gradient._is_initialized() else None

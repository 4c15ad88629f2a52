"""Decides which tensors may be copied while forward and backward run: those that only an optimizer's step changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from holdfast.stage import cuda_copy
from holdfast.stage.staging import LONG_BYTES_MIN
from holdfast.state.named import modules_of
from holdfast.state.optimizer_shards import OptimizerShards
from holdfast.state.optimizer_wrappers import innermost
from holdfast.state.train_state import EXTRA
from holdfast.tensors.fragments import local_tensor
from holdfast.tensors.leaves import RANK_PREFIX, Leaf
from holdfast.tensors.live_pieces import LivePiece
from holdfast_formats.errors import InvalidRequest
from holdfast_formats.staging.arena import PAGE_BYTES


class Judge:
    """Return a function that judges the pieces of this state, for one save.

    Settled are parameters, masters, optimizer state and EMA copies, if the steps of the state's optimizers can all be waited
    for. If the caller has promised to fence (`fenced`), all tensors but buffers are settled. Restless are buffers (a forward
    changes them), tensors on a device that cannot be waited for in the background, and everything that the user may change
    at any time.
    """

    def __init__(self, state: Mapping[str, Any], fenced: bool) -> None:
        self._state, self._fenced = state, fenced
        # What an optimizer that cannot be waited for changes, weights among it, is not known: nothing waits then.
        waits = all(entry.hooks for entry in state.values() if isinstance(entry, OptimizerShards))
        self._any = fenced or (waits and bool(innermost(state)))

    def __call__(self, leaf: Leaf, piece: LivePiece) -> bool:
        kind = piece.tensor.device.type
        if not self._any or not (kind == "cpu" or kind in cuda_copy.KINDS) or leaf.name.startswith(RANK_PREFIX):
            return False
        return (leaf.group != EXTRA or self._fenced) and piece.tensor.data_ptr() not in self._buffers

    @cached_property
    def _buffers(self) -> frozenset[int]:
        modules = [module for value in self._state.values() for module in modules_of(value)]
        return frozenset(local_tensor(buffer).data_ptr() for module in modules for buffer in module.buffers())


class Growth(NamedTuple):
    """How much the state will grow, per rank."""

    bytes: int
    tensors: int


def expected_growth(state: Mapping[str, Any]) -> Growth:
    """Bytes and tensors that optimizers without a step yet will add: two moments for each parameter, as in Adam. An
    estimate for the slots.
    """
    size = count = 0
    for optimizer in innermost(state):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    local = local_tensor(parameter)
                    size += 2 * (local.nbytes + (PAGE_BYTES if local.nbytes >= LONG_BYTES_MIN else 0)) + 256
                    count += 3
    return Growth(size, count)


def _nothing(*_: object) -> None:
    """Replaces the hooks after removal."""


class StepHooks:
    """Calls the given hooks around each step of the state's optimizers that `renew` has found: `optimizers`."""

    def __init__(
        self, state: Mapping[str, Any], before_step: Callable[..., None], after_step: Callable[..., None] = lambda *_: None
    ) -> None:
        self._state = state
        self._before_step, self._after_step = before_step, after_step
        self.optimizers: list[torch.optim.Optimizer] = []
        self._handles: list[RemovableHandle] = []

    def renew(self) -> None:
        """Hook new optimizers of the state. Raises `InvalidRequest` for one whose step has no hooks."""
        for optimizer in innermost(self._state):
            if not any(optimizer is known for known in self.optimizers):
                before, after = self._before_step, self._after_step
                if getattr(optimizer, "compiled", True):
                    # Else torch.compile of a step would trace into the hooks. Only for optimizers of torch, which load that
                    # part of it too: it takes a second.
                    before, after = map(torch.compiler.disable, (before, after))
                try:
                    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
                except AttributeError:
                    raise InvalidRequest(
                        f"{type(optimizer).__name__}.step() has no hooks, so its updates cannot wait for the "
                        "background copy",
                        hint="call torch.optim.Optimizer.__init__ in its class, or pass the optimizer inside it",
                    ) from None
                self.optimizers.append(optimizer)
                self._handles += handles

    def remove(self) -> None:
        """Remove all hooks for good, and drop the references to the callbacks and the state."""
        while self._handles:
            self._handles.pop().remove()
        self._before_step = self._after_step = _nothing
        self._state = {}
        self.optimizers.clear()

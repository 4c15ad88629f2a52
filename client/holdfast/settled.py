"""Which of the live state only an optimizer's step changes. Such tensors may be copied while forward and backward run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .fragments import Piece, local_tensor
from .leaves import Leaf
from .state import EXTRA


def judge(state: Mapping[str, Any]) -> Callable[[Leaf, Piece], bool]:
    """A judge of this state's pieces.

    Settled are parameters, masters, optimizer state and EMA copies, if the state has an optimizer whose step can be waited
    for. Restless are buffers (a forward changes them), device memory, and whatever the user may change at any time.
    """
    if not optimizers(state):
        return lambda leaf, piece: False
    buffers = {
        local_tensor(buffer).data_ptr()
        for module in state.values()
        if isinstance(module, nn.Module)
        for buffer in module.buffers()
    }

    def settled(leaf: Leaf, piece: Piece) -> bool:
        tensor = piece.tensor
        return leaf.group != EXTRA and tensor.device.type == "cpu" and tensor.data_ptr() not in buffers

    return settled


def optimizers(state: Mapping[str, Any]) -> list[torch.optim.Optimizer]:
    """The optimizers whose steps can be hooked."""
    return [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]


class Growth(NamedTuple):
    """How much more there will be to save, per rank."""

    bytes: int
    tensors: int


def expected_growth(state: Mapping[str, Any]) -> Growth:
    """Bytes and tensors that optimizers which have not stepped yet will add: two moments for each parameter, as Adam keeps.

    An estimate for the size of a slot; a state that turns out larger gets a larger one.
    """
    size = count = 0
    for optimizer in optimizers(state):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and not optimizer.state.get(parameter):
                    local = local_tensor(parameter)
                    size += 2 * local.numel() * local.element_size() + 256
                    count += 3
    return Growth(size, count)

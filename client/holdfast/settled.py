"""Which of the live state only an optimizer's step changes. Such tensors may be copied while forward and backward run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from holdfast_formats.arena import PAGE_BYTES

from . import device
from .fragments import Piece, local_tensor
from .leaves import RANK_PREFIX, Leaf
from .staging import LONG_BYTES_MIN
from .state import EXTRA


class Judge:
    """A judge of this state's pieces, for one save.

    Settled are parameters, masters, optimizer state and EMA copies, if the state has an optimizer whose step can be waited
    for; and any tensor but buffers, if the caller has promised to fence (`fenced`). Restless are buffers (a forward changes
    them), what is on a device that cannot be waited for in the background, and whatever the user may change at any time.
    """

    def __init__(self, state: Mapping[str, Any], fenced: bool) -> None:
        self._state, self._fenced = state, fenced
        self._any = fenced or bool(optimizers(state))

    def __call__(self, leaf: Leaf, piece: Piece) -> bool:
        kind = piece.tensor.device.type
        if not self._any or not (kind == "cpu" or kind in device.KINDS) or leaf.name.startswith(RANK_PREFIX):
            return False
        return (leaf.group != EXTRA or self._fenced) and piece.tensor.data_ptr() not in self._buffers

    @cached_property
    def _buffers(self) -> frozenset[int]:
        modules = [value for value in self._state.values() if isinstance(value, nn.Module)]
        return frozenset(local_tensor(buffer).data_ptr() for module in modules for buffer in module.buffers())


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
                    size += 2 * (local.nbytes + (PAGE_BYTES if local.nbytes >= LONG_BYTES_MIN else 0)) + 256
                    count += 3
    return Growth(size, count)

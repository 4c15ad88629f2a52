"""What a state stores anyway: memory of tensors, and objects with a state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from holdfast.state import optimizer_wrappers
from holdfast.state.modules import is_tensor, is_tensors
from holdfast.state.named import modules_of


class AlreadyStored:
    """What a state stores, found in a walk. Plain values of the state, which a walk does not cover, are checked each time.

    It has no references to its users, so that no cycle keeps the state.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state
        self._found: _Found | None = None
        self._in_values: frozenset[int] | None = None
        self.flat = False  # FSDP1 puts views of its flat parameters into attributes

    def look_again(self) -> None:
        self._found = self._in_values = None

    def look_at_values(self) -> None:
        """Check the values that may change without a walk."""
        self._in_values = None

    def has(self, value: object) -> bool:
        """Whether a tensor's memory is in the checkpoint, or an object is an entry of the state or inside of one."""
        if self._found is None:
            self._found = _Found.of(self._state)
        if not isinstance(value, torch.Tensor):
            return id(value) in self._found.objects
        if self.flat or (place := optimizer_wrappers.address(value)) in self._found.memory:
            return True
        if self._in_values is None:
            self._in_values = _memory(tree_leaves([self._state.get(key) for key in self._found.values]))
        return place in self._in_values


class _Found(NamedTuple):
    memory: frozenset[int]
    objects: frozenset[int]
    values: tuple[str, ...]

    @staticmethod
    def of(state: Mapping[str, Any]) -> _Found:
        modules = [part for value in state.values() for module in modules_of(value) for part in module.modules()]
        inner = optimizer_wrappers.innermost(state)
        tensors = [tensor for part in modules for tensor in (*part.parameters(False), *part.buffers(False))]
        tensors += [kept for one in inner for held in one.state.values() for kept in held.values()]
        tensors += [tensor for one in inner for group in one.param_groups for tensor in group["params"]]
        others = {
            key: value for key, value in state.items() if not (modules_of(value) or optimizer_wrappers.is_optimizer(value))
        }
        named = {key: value for key, value in others.items() if is_tensor(value) or is_tensors(value)}
        memory = frozenset({0, *_memory(tensors), *_memory(tree_leaves(list(named.values())))})
        objects = frozenset(map(id, (*state.values(), *modules, *inner)))
        return _Found(memory, objects, tuple(key for key in others if key not in named))


def _memory(leaves: Iterable[object]) -> frozenset[int]:
    return frozenset(optimizer_wrappers.address(one) for one in leaves if isinstance(one, torch.Tensor))

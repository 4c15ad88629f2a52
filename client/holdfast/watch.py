"""Whether the live state is still made up as an earlier save found it, found out without walking through it again.

What a walk went through is noted: the containers, with what stood in them, and the tensors, with their memory. As long as
every container holds the very same things and every tensor is the same stretch of memory, another walk would find the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import eq, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from .fragments import Fragment, Storable, is_dtensor
from .modules import unwrap

_PLAIN_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state")


class _Seen(NamedTuple):
    """A mapping and what it held: its keys and values in order."""

    mapping: Mapping[Any, Any]
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    @property
    def unchanged(self) -> bool:
        held = self.mapping
        return len(held) == len(self.keys) and all(map(is_, held, self.keys)) and all(map(is_, held.values(), self.values))


class Watch:
    """What one walk found. `possible` is False when it met something of which only a new walk can tell the state."""

    def __init__(self) -> None:
        self.possible = True
        self._seen: list[_Seen] = []
        self._lists: list[tuple[list[Any], tuple[Any, ...]]] = []
        self._transient: list[tuple[nn.Module, frozenset[str]]] = []  # modules, and their buffers that are not saved
        self._hooked: list[tuple[nn.Module, str]] = []
        self._sharded: list[tuple[Any, torch.Tensor]] = []
        self._forms = _Forms(())

    def unchanged(self) -> bool:
        """Whether a new walk would find the very same tensors at the very same places."""
        if not self.possible:
            return False
        for module, prefix in self._hooked:  # FSDP2 brings its parameters back to their shards here
            for hook in module._state_dict_pre_hooks.values():
                hook(module, prefix, True)
        return (
            all(seen.unchanged for seen in self._seen)
            and all(len(held) == len(before) and all(map(is_, held, before)) for held, before in self._lists)
            and all(module._non_persistent_buffers_set == names for module, names in self._transient)
            and all(tensor._local_tensor is local for tensor, local in self._sharded)
            and self._forms.unchanged
        )

    def see(self, mapping: Mapping[Any, Any]) -> None:
        """Note a container and what stands in it now."""
        self._seen.append(_Seen(mapping, tuple(mapping), tuple(mapping.values())))

    def see_module(self, module: nn.Module) -> None:
        """Note everything that decides what a module's `state_dict` holds."""
        for mapping in (module._modules, module._buffers):  # of a wrapper: what it wraps, and what it counts
            self.see(mapping)
        inner = unwrap(module.module if isinstance(module, AveragedModel) else module)
        for prefix, part in inner.named_modules(remove_duplicate=False):
            if part._state_dict_hooks or any(_is_special(part, method) for method in _PLAIN_METHODS):
                self.possible = False
                return
            for mapping in (
                part._parameters,
                part._buffers,
                part._modules,
                part._state_dict_pre_hooks,
                part._state_dict_hooks,
            ):
                self.see(mapping)
            if part._buffers:
                self._transient.append((part, frozenset(part._non_persistent_buffers_set)))
            if part._state_dict_pre_hooks:
                self._hooked.append((part, f"{prefix}." if prefix else ""))

    def see_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note its parameters, and the tensors and values that it keeps for each."""
        self.see(optimizer.state)
        for kept in optimizer.state.values():
            self.see(kept)
        self._lists.append((optimizer.param_groups, tuple(optimizer.param_groups)))
        for group in optimizer.param_groups:
            self._lists.append((group["params"], tuple(group["params"])))

    def see_memory(self, tensors: Iterable[Storable]) -> None:
        """Note where tensors lie, and in what form. Call it once, with all of them."""
        memory: list[torch.Tensor] = []
        for value in tensors:
            if isinstance(value, Fragment):
                memory.append(value.tensor)
            elif is_dtensor(value):
                local = value._local_tensor  # type: ignore[attr-defined]
                self._sharded.append((value, local))
                memory.append(local)
            else:
                memory.append(value)
        self._forms = _Forms(memory)


def _is_special(module: nn.Module, method: str) -> bool:
    return method in vars(module) or getattr(type(module), method) is not getattr(nn.Module, method)


class _Forms:
    """Where tensors lie and what they are. Strides are compared only where they do not follow from the shape."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._contiguous = [tensor.is_contiguous() for tensor in tensors]
        self._shapes = [tensor.shape for tensor in tensors]
        self._strided = [(tensor, tensor.stride()) for tensor in tensors if not tensor.is_contiguous()]

    @property
    def unchanged(self) -> bool:
        tensors = self._tensors
        return (
            [tensor.data_ptr() for tensor in tensors] == self._addresses
            and [tensor.dtype for tensor in tensors] == self._dtypes
            and [tensor.is_contiguous() for tensor in tensors] == self._contiguous
            # One at a time: a list of as many new tuples would set off Python's garbage collection.
            and all(map(eq, (tensor.shape for tensor in tensors), self._shapes))
            and all(tensor.stride() == stride for tensor, stride in self._strided)
        )

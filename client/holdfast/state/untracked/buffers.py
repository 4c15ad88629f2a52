"""Finds buffers that are not persistent and that training changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef


class _Seen(NamedTuple):
    """A buffer at the first look: the tensor, its version, and its form."""

    path: str
    module: nn.Module
    tensor: TensorWeakRef
    version: int
    shape: torch.Size
    device: torch.device

    def has_changed(self, now: torch.Tensor) -> bool:
        return self.tensor() is not now or version(now) != self.version

    def is_elsewhere(self, now: torch.Tensor) -> bool:
        """Whether it is another tensor only because its module was moved to another device."""
        return now.device != self.device and now.shape == self.shape


class Buffers:
    """The non-persistent buffers of modules when they were first seen."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, str], _Seen] = {}
        self._changed: dict[str, None] = {}

    def record(self, path: str, modules: Iterable[tuple[str, nn.Module]]) -> None:
        for prefix, module in modules:
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers.get(name)
                if buffer is not None and (id(module), name) not in self._first:
                    self._note(".".join(filter(None, (path, prefix, name))), module, name, buffer)

    def look_again(self) -> None:
        """Record everything again as the first look."""
        for (_, name), seen in list(self._first.items()):
            if (buffer := seen.module._buffers.get(name)) is not None:
                self._note(seen.path, seen.module, name, buffer)

    def changed(self) -> list[str]:
        for (_, name), seen in list(self._first.items()):
            buffer = seen.module._buffers.get(name)
            if seen.path in self._changed or buffer is None or not seen.has_changed(buffer):
                continue
            if seen.is_elsewhere(buffer):
                self._note(seen.path, seen.module, name, buffer)
            else:
                self._changed[seen.path] = None
        return list(self._changed)

    def _note(self, path: str, module: nn.Module, name: str, buffer: torch.Tensor) -> None:
        form = buffer.shape, buffer.device
        self._first[id(module), name] = _Seen(path, module, TensorWeakRef(buffer), version(buffer), *form)


def version(tensor: torch.Tensor) -> int:
    """torch's write counter of a tensor; 0 for inference tensors, which have none."""
    try:
        return tensor._version
    except RuntimeError:  # of inference mode
        return 0

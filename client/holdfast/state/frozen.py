"""Determines which tensors are frozen: parameters that nothing in the state trains, so that their bytes probably stay.

It is an expectation, and the same at every save: it says what a tensor is, not whether it has changed. Copies are compared
with what they replace, and files by their digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from holdfast.state import masters
from holdfast.state.extras import GROUP as EXTRA
from holdfast.state.modules import EMA, MODEL, NamedTensors, inner_names, is_trained
from holdfast.state.optimizer_entries import OptimizerEntry
from holdfast.state.optimizers import KeyedOptimizers
from holdfast.tensors.fragments import Fragment, Storable, local_tensors, parts_of
from holdfast.tensors.leaves import Key
from holdfast.tensors.torch_dtypes import MemorySpan, MemorySpans, has_memory, memory_span


def keys(named: Sequence[NamedTensors], optimizers: Sequence[OptimizerEntry]) -> frozenset[Key]:
    """Group and name of parameters that require no gradient and that no optimizer steps.

    Trained are also buffers, weights with a full-precision copy, averages of other weights than frozen ones, and everything
    that shares memory with trained tensors.
    """
    if not any(_is_still(value) for _, _, value in _tensors(named)):  # as in most trainings
        return frozenset()
    stepped = {name for optimizer in optimizers for name in _stepped(optimizer)}
    weights = {_prefixed(part, name): value for part, name, value in _tensors(named) if part.group not in _BESIDE}
    stepped |= {pair.name for pair in masters.in_place_of(weights, stepped)}
    stepped |= {name for part, name, _ in _tensors(named) if part.group == masters.MASTER_GROUP}
    found: dict[Key, Storable] = {}
    moving: list[Storable] = [value for optimizer in optimizers for value in optimizer.tensors()]
    trained = {name: not _is_still(value) or name in stepped for part, name, value in _tensors(named) if part.group == MODEL}
    for part, name, value in _tensors(named):
        if part.group == EMA:
            moves = next((trained[inner] for inner in inner_names(name) if inner in trained), True)
        else:
            moves = part.group in _BESIDE or _prefixed(part, name) in stepped
        if moves or not _is_still(value):
            moving.append(value)
        else:
            found[part.group, part.prefix + name] = value
    if not found:
        return frozenset()
    spans = MemorySpans(span for value in moving for span in _spans(value))
    return frozenset(key for key, value in found.items() if not any(map(spans.meet, _spans(value))))


class GradientNotes(NamedTuple):
    """Which tensors required a gradient."""

    tensors: tuple[torch.Tensor, ...]
    required: list[bool]

    def as_noted(self) -> bool:
        """Whether the same do now."""
        return [tensor.requires_grad for tensor in self.tensors] == self.required


NO_GRADIENTS = GradientNotes((), [])


def note(named: Sequence[NamedTensors]) -> GradientNotes:
    """Note which tensors require a gradient now."""
    tensors = tuple(tensor for _, _, value in _tensors(named) for tensor in _held(value))
    return GradientNotes(tensors, [tensor.requires_grad for tensor in tensors])


_BESIDE = (masters.MASTER_GROUP, EMA, EXTRA)  # groups without weights


def _tensors(named: Sequence[NamedTensors]) -> Iterator[tuple[NamedTensors, str, Storable]]:
    return ((part, name, value) for part in named for name, value in part.state.tensors.items())


def _prefixed(part: NamedTensors, name: str) -> str:
    """The name under which optimizers know a parameter."""
    return name if part.group == MODEL else f"{part.group}.{name}"


def _stepped(optimizer: OptimizerEntry) -> Iterable[str]:
    """The parameters that an optimizer steps. If it was given frozen ones as well, they have neither gradient nor state."""
    if not isinstance(optimizer, KeyedOptimizers):
        return optimizer.parameter_names()
    return (
        one.name
        for one in optimizer.parameters()
        if one.tensor.requires_grad or one.tensor.grad is not None or one.optimizer.state.get(one.tensor)
    )


def _is_still(value: Storable) -> bool:
    return not is_trained(value) and all(isinstance(tensor, nn.Parameter) for tensor in _held(value))


def _held(value: Storable) -> Iterator[torch.Tensor]:
    return (part.held if isinstance(part, Fragment) else part for part in parts_of(value))


def _spans(value: Storable) -> Iterator[MemorySpan]:
    locals_: Iterable[torch.Tensor] = local_tensors(value)
    return (memory_span(local) for local in locals_ if has_memory(local) and local.numel())

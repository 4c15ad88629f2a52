"""Compares strided views of memory: which of them share an element, and where one is inside another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from holdfast.tensors.torch_dtypes import has_memory


def extent(tensor: torch.Tensor) -> int:
    """The number of elements of memory from the tensor's first element to its last."""
    return (
        1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    )


def start_in(part: torch.Tensor, outer: torch.Tensor) -> int | None:
    """Offset of a view in elements from the first of `outer`, which has no gaps; None if it is outside.

    An empty view is inside of everything, at its beginning.
    """
    if not part.numel():
        return 0
    if part.device != outer.device or part.element_size() != outer.element_size() or not has_memory(part):
        return None
    start, rest = divmod(part.data_ptr() - outer.data_ptr(), outer.element_size())
    return start if not rest and start >= 0 and start + extent(part) <= extent(outer) else None


class _Term(NamedTuple):
    """A whole number of times from `low` to `high` that a distance may contain `bytes`."""

    bytes: int
    low: int
    high: int


def any_share_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether two of these tensors have a byte of memory in common; those without plain memory do not count."""
    return next(sharing(tensors), None) is not None


class Shared(NamedTuple):
    """The places, in a list of tensors, of two that have a byte of memory in common."""

    first: int
    second: int


def sharing(tensors: Iterable[torch.Tensor]) -> Iterator[Shared]:
    """All pairs of these tensors with a byte of memory in common; those without plain memory do not count."""
    placed = [(number, tensor) for number, tensor in enumerate(tensors) if has_memory(tensor) and tensor.numel()]
    active: list[tuple[int, torch.Tensor]] = []
    for number, tensor in sorted(placed, key=lambda one: one[1].data_ptr()):
        start = tensor.data_ptr()
        active = [one for one in active if one[1].data_ptr() + extent(one[1]) * one[1].element_size() > start]
        for before, other in active:
            if _share_memory(other, tensor):
                yield Shared(*sorted((before, number)))
        active.append((number, tensor))


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device:
        return False
    reach: dict[int, tuple[int, int]] = {}  # stride in bytes -> how often the way from a to b may contain it
    for tensor, sign in ((a, 1), (b, -1)):
        size = tensor.element_size()
        for stride, n in ((1, size), *zip((stride * size for stride in tensor.stride()), tensor.shape, strict=True)):
            low, high = reach.get(stride, (0, 0))
            reach[stride] = (low, high + n - 1) if sign > 0 else (low - n + 1, high)
    terms = [_Term(stride, *reach[stride]) for stride in sorted(reach, reverse=True) if stride and any(reach[stride])]
    return _is_sum(b.data_ptr() - a.data_ptr(), terms)


def _is_sum(distance: int, terms: Sequence[_Term]) -> bool:
    if not terms:
        return distance == 0
    first, *rest = terms
    least, most = sum(term.bytes * term.low for term in rest), sum(term.bytes * term.high for term in rest)
    low = max(first.low, -((most - distance) // first.bytes))
    high = min(first.high, (distance - least) // first.bytes)
    return any(_is_sum(distance - times * first.bytes, rest) for times in range(low, high + 1))

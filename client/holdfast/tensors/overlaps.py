"""Stored tensors whose live memory overlaps without being one tensor, such as a weight and its transpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from holdfast.tensors.casting import Cast
from holdfast.tensors.leaves import Leaf
from holdfast.tensors.torch_dtypes import SIGNED, as_integers
from holdfast.tensors.views import extent, sharing


class Overlap(NamedTuple):
    """Two pieces of live memory with bytes in common, and the leaves that are filled apart from it to compare these."""

    first: Leaf
    other: Leaf
    live: tuple[torch.Tensor, torch.Tensor]

    @property
    def text(self) -> str:
        return f"{self.other.path} overlaps {self.first.path} here"

    def is_equal(self) -> bool:
        """Whether the stored values of both agree about their common elements."""
        one, other = self.live
        if one.dtype != other.dtype:
            return False
        first, second = (leaf.pieces[0].tensor.to(one.dtype) for leaf in (self.first, self.other))
        start, width = min(one.data_ptr(), other.data_ptr()), one.element_size()
        offsets = [(live.data_ptr() - start) // width for live in self.live]
        size = max(offset + extent(live) for offset, live in zip(offsets, self.live, strict=True))
        line = torch.zeros(size, dtype=one.dtype, device=first.device)
        views = [line.as_strided(live.shape, live.stride(), at) for live, at in zip(self.live, offsets, strict=True)]
        views[0].copy_(first)
        views[1].copy_(second)
        return torch.equal(*(as_integers(held.contiguous(), SIGNED) for held in (views[0], first)))


def overlaps(filled: Iterable[Cast]) -> list[Overlap]:
    """All pairs of pieces of different leaves that share some bytes of live memory."""
    placed = [(cast, number) for cast in filled for number in range(len(cast.live.pieces))]
    overlapping = []
    for pair in sharing(cast.live.pieces[number].tensor for cast, number in placed):
        (first, one), (second, other) = placed[pair.first], placed[pair.second]
        if first is not second:
            live = first.live.pieces[one].tensor, second.live.pieces[other].tensor
            overlapping.append(Overlap(_apart(first.stored, one), _apart(second.stored, other), live))
    return overlapping


def _apart(leaf: Leaf, number: int) -> Leaf:
    piece = leaf.pieces[number]
    return leaf._replace(pieces=(piece._replace(tensor=torch.empty_like(piece.tensor)),))

"""A checkpoint without bytes on disk: what the snapshots of all ranks say, put together, and given back to any rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.state.train_state import Leaf, MatchedLeaves, OfferedLeaves, Snapshot, TrainState
from holdfast.tensors.torch_dtypes import local_shape, packing, torch_dtype
from holdfast_formats.disk import state_json
from holdfast_formats.region import Box
from tests.tiling import tiles


class Checkpoint:
    """Whole tensors by (group, name), assembled from pieces; JSON merged and picked by the rules of state.json."""

    def __init__(self, *snapshots: Snapshot) -> None:
        self.tensors: dict[tuple[str, str], torch.Tensor] = {}
        self.specs: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
        self.aliases: dict[str, dict[str, str]] = {}
        boxes: dict[tuple[str, str], set[Box]] = {}
        for snapshot in snapshots:
            for group in snapshot.groups:
                self.specs.setdefault(group, {})
            for leaf in snapshot.leaves:
                self._take(leaf)
                boxes.setdefault(leaf.key, set()).update(piece.box for piece in leaf.pieces)
            for group, aliases in snapshot.aliases.items():
                self.aliases.setdefault(group, {}).update(aliases)
        for (group, name), held in boxes.items():
            assert tiles(list(held), self.specs[group][name][1]), (group, name, held)
        groups = sorted({group for snapshot in snapshots for group in snapshot.groups})
        self.state = state_json.merge(1, {}, groups, {rank: s.values for rank, s in enumerate(snapshots)})

    def _take(self, leaf: Leaf) -> None:
        spec = (leaf.dtype, leaf.shape)
        assert self.specs.setdefault(leaf.group, {}).setdefault(leaf.name, spec) == spec
        dtype = torch_dtype(leaf.dtype)
        raw = _raw_zeros(local_shape(dtype, leaf.shape), dtype)
        whole = self.tensors.setdefault(leaf.key, raw)
        for piece in leaf.pieces:
            _raw(_cut(whole, piece.box)).copy_(_raw(piece.tensor))

    def stored(self, rank: int = 0) -> OfferedLeaves:
        """What this checkpoint offers to a rank."""
        return OfferedLeaves(self.specs, self.aliases, state_json.for_rank(self.state, rank).values)

    def fill(self, restoration: MatchedLeaves) -> None:
        """Write the stored bytes into every leaf of the restoration."""
        self.fill_leaves(restoration.leaves)

    def fill_leaves(self, leaves: Sequence[Leaf]) -> None:
        for leaf in leaves:
            whole = self.tensors[leaf.group, leaf.name]
            for piece in leaf.pieces:
                _raw(piece.tensor).copy_(_raw(_cut(whole, piece.box)))


def _raw_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.zeros(shape, dtype=unsigned).view(dtype)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """A box counts the format's elements; torch counts float4 in pairs."""
    factor = packing(whole.dtype)
    if factor > 1:
        box = Box((*box.offset[:-1], box.offset[-1] // factor), (*box.shape[:-1], box.shape[-1] // factor))
    return whole[box.slices]


def save(state: Mapping[str, Any], groups: tuple[str, ...] | None = None) -> Checkpoint:
    """The checkpoint of a world of one."""
    return Checkpoint(TrainState(state, 0, 1).snapshot(groups))


def restore(checkpoint: Checkpoint, state: Mapping[str, Any], **options: Any) -> MatchedLeaves:
    """Prepare, fill and apply, in a world of one."""
    restoration = TrainState(state, 0, 1).prepare(checkpoint.stored(), **options)
    restoration.check_ties(checkpoint.fill_leaves)
    checkpoint.fill_leaves(restoration.leaves)
    restoration.apply()
    return restoration

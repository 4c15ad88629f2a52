"""Determines which part of a global tensor a live tensor holds: plain tensors, DTensors, and declared shards.

A framework's sharding becomes boxes, and views of the memory that holds them. Nothing communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.tensors.fragments import (
    Fragment,
    FragmentList,
    OneTensor,
    Storable,
    global_shape,
    is_dtensor,
    local_tensor,
    local_tensors,
)
from holdfast.tensors.torch_dtypes import check_storable, element_shape, packing
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Box, Shape, whole

LAYOUTS_REMEMBERED = 1024

Run = tuple[int, int]  # global indices [start, stop) along one dimension


def root_mesh(mesh: Any) -> Any:
    """The device mesh of which this one is a part, in versions of torch that know it."""
    root = getattr(mesh, "_get_root_mesh", None)
    return mesh if root is None else root()


def dimensions(mesh: Any) -> dict[str, int]:
    """The sizes of a device mesh's dimensions, outermost first."""
    names = mesh.mesh_dim_names or tuple(f"mesh_{d}" for d in range(mesh.ndim))
    return {dimension: int(n) for dimension, n in zip(names, mesh.shape, strict=True)}


def mesh_boxes(value: Any, local: Shape, name: str) -> tuple[list[Box], str, dict[str, int]]:
    """A DTensor's boxes, what its placement says, and the dimensions of its mesh, or of that of which its mesh is a part."""
    mesh, shape = value.device_mesh, tuple(value.shape)
    names, every = dimensions(mesh), dimensions(root_mesh(mesh))
    sizes = every if names.keys() <= every.keys() else names
    text = ", ".join(f"{dimension}={placement!r}" for dimension, placement in zip(names, value.placements, strict=True))
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is outside the mesh
        return [], text, sizes
    splits = tuple(
        _split(placement, int(mesh.shape[d]), int(coordinate[d]), name, len(shape))
        for d, placement in enumerate(value.placements)
    )
    try:
        return list(_boxes(shape, local, splits)), text, sizes
    except ValueError as misfit:
        hint = "make the dimension divisible by the product of its mesh dimensions"
        raise StateMismatch(f"tensor {name!r}: {misfit}", hint=hint) from None


class Shards(NamedTuple):
    """The boxes into which a tensor is cut, each once, in the order of their first elements, and the place in them of this
    rank's; None if it has no elements.
    """

    shape: Shape
    boxes: tuple[Box, ...]
    own: int | None

    @property
    def box(self) -> Box | None:
        return None if self.own is None else self.boxes[self.own]


def shards_of(value: Storable, name: str) -> Shards | None:
    """How all ranks together cut a tensor; None if that is not known, or if a rank's part is not one box."""
    shape = global_shape(value)
    if not is_dtensor(value):
        return None if isinstance(value, Fragment | FragmentList) else Shards(shape, (whole(shape),), 0)
    mesh: Any = value.device_mesh  # type: ignore[union-attr]
    sizes, placements = [int(n) for n in mesh.shape], value.placements  # type: ignore[union-attr]
    found: dict[tuple[int, ...], Box] = {}
    for place in product(*map(range, sizes)):
        parts = (_split(*cut, name, len(shape)) for cut in zip(placements, sizes, place, strict=True))
        splits = [split for split in parts if split is not None]
        cuts = [[split for split in splits if split.dimension == d] for d in range(len(shape))]
        runs = [split_runs(n, cut) for n, cut in zip(shape, cuts, strict=True)]
        if runs != [split_runs(n, _unstrided(cut)) for n, cut in zip(shape, cuts, strict=True)]:
            return None
        if any(len(run) > 1 for run in runs):
            return None
        if all(runs):
            found[place] = Box(tuple(run[0][0] for run in runs), tuple(run[0][1] - run[0][0] for run in runs))
    boxes = tuple(sorted(set(found.values())))
    own = found.get(tuple(mesh.get_coordinate() or ()))
    return Shards(shape, boxes, None if own is None else boxes.index(own))


def is_alone(value: Any) -> bool:
    """Whether a DTensor's mesh has every rank, and shards it along every dimension of more than one rank."""
    sizes = tuple(int(n) for n in value.device_mesh.shape)
    cut = all(n == 1 or not placement.is_replicate() for n, placement in zip(sizes, value.placements, strict=True))
    return cut and prod(sizes) == torch.distributed.get_world_size()


class Split(NamedTuple):
    """One mesh dimension's cut of a tensor dimension: into `parts`, of which this rank has number `part`.

    `factor` is None for `Shard`. For `_StridedShard` it is the split factor: the dimension is cut into `factor` blocks
    first, each block into `parts`, and the rank has its part of every block.
    """

    dimension: int
    parts: int
    part: int
    factor: int | None = None


def split_runs(size: int, splits: Sequence[Split]) -> list[Run]:
    """The global indices that are left after these cuts, applied one after the other as DTensor does: `torch.chunk` each."""
    runs = [(0, size)] if size else []
    for split in splits:
        runs = _chunk(runs, split.parts, split.part) if split.factor is None else _strided_chunk(runs, split)
    return runs


def _length(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _cut(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    kept: list[Run] = []
    position = 0
    for start, stop in runs:
        low, high = max(begin - position, 0) + start, min(end - position, stop - start) + start
        if low < high and kept and kept[-1][1] == low:
            kept[-1] = (kept[-1][0], high)
        elif low < high:
            kept.append((low, high))
        position += stop - start
    return kept


def _chunk(runs: Sequence[Run], parts: int, part: int) -> list[Run]:
    size = -(-_length(runs) // parts)
    return _cut(runs, part * size, (part + 1) * size)


def _strided_chunk(runs: Sequence[Run], split: Split) -> list[Run]:
    factor = split.factor or 1
    mine = [run for block in range(factor) for run in _chunk(_chunk(runs, factor, block), split.parts, split.part)]
    return _cut(mine, 0, _length(mine))


@lru_cache(maxsize=LAYOUTS_REMEMBERED)
def _boxes(shape: Shape, local: Shape, splits: tuple[Split | None, ...]) -> tuple[Box, ...]:
    """The boxes that these cuts leave of a tensor; cached, because a model has few shapes. `ValueError` if the local
    tensor does not fit.
    """
    cuts = [[s for s in splits if s and s.dimension == d] for d in range(len(shape))]
    if 0 in local and 0 in (_length(split_runs(n, cut)) for n, cut in zip(shape, cuts, strict=True)):
        return ()  # torch gives an empty shard any shape
    runs = [_runs_along(d, shape[d], local, cuts[d]) for d in range(len(shape))]
    return tuple(
        Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell)) for cell in product(*runs)
    )


def _split(placement: Any, parts: int, part: int, name: str, dimensions: int) -> Split | None:
    if placement.is_replicate():
        return None
    factor = getattr(placement, "split_factor", None)  # of _StridedShard only; since torch 2.13 that is not a Shard
    if factor is None and not placement.is_shard():
        raise InvalidRequest(
            f"tensor {name!r} has the placement {placement!r}: its value is not reduced yet",
            hint="redistribute it to Shard or Replicate before you add it to the state",
        )
    dimension = placement.dim + dimensions if placement.dim < 0 else placement.dim
    return Split(dimension, parts, part, None if factor is None else int(factor))


def _runs_along(dimension: int, size: int, local: Shape, splits: list[Split]) -> list[Run]:
    """The rank's indices along one dimension, consistent with the local tensor's length there.

    DTensor cuts from left to right. fully_shard cuts what tensor parallelism left, so strided cuts come last. For even
    shapes both give the same. If they differ, the local length decides; if it cannot decide, this is a `ValueError`.
    """
    runs = split_runs(size, splits)
    fully_sharded = split_runs(size, _unstrided(splits))
    length = local[dimension] if dimension < len(local) else 0
    candidates = [candidate for candidate in (runs, fully_sharded) if _length(candidate) == length]
    if not candidates or any(candidate != candidates[0] for candidate in candidates):
        how = "fits two layouts" if candidates else "does not fit its placements"
        raise ValueError(f"a local length of {length} in dimension {dimension} of {size} {how} {splits}")
    return candidates[0]


def _unstrided(splits: Sequence[Split]) -> list[Split]:
    """The cuts in the order in which fully_shard makes them: strided ones last, of what tensor parallelism left."""
    return [split._replace(factor=None) for split in sorted(splits, key=lambda split: split.factor is not None)]


class LivePiece(NamedTuple):
    """A box of the global tensor and the live memory that holds it: writing into `tensor` writes the user's tensor.

    `tensor` is a detached view of the box's shape. float4 elements come in pairs, so there it has half the last
    dimension.
    """

    box: Box
    tensor: torch.Tensor


class PlacedPieces(NamedTuple):
    """The part of a global tensor that a rank holds. `placement` is text; `mesh` maps dimension names to sizes.
    `alone`: by its placements, no other rank holds any of it.
    """

    shape: Shape
    pieces: tuple[LivePiece, ...]
    placement: str
    mesh: dict[str, int]
    alone: bool = False


def pieces(value: Storable, name: str) -> PlacedPieces:
    """The boxes of `value` that this rank holds, as views of its live memory; empty if the rank holds nothing.

    Raises `InvalidRequest` by name for tensors that cannot be stored (a Partial placement, a layout without memory), and
    `StateMismatch` if a local tensor does not have the shape that follows from its placements.
    """
    if isinstance(value, FragmentList):
        return _joined(value, local_tensors(value), name)
    return _placed(value, local_tensor(value), name)


def pieces_like(value: Storable, local: torch.Tensor, name: str) -> PlacedPieces:
    """The boxes of `value`, held by `local` instead of its own memory: per-shard state of a sharded parameter.

    For a list of Fragments, `local` has the shape of the optimizer's parameter.
    """
    if isinstance(value, FragmentList):
        check_storable(local, name)
        return _joined(value, value.views_of(local, name), name)
    return _placed(value, local, name)


def _joined(value: FragmentList, views: Sequence[torch.Tensor], name: str) -> PlacedPieces:
    placed = [_placed(part, view, name) for part, view in zip(value.parts, views, strict=True)]
    return PlacedPieces(placed[0].shape, tuple(piece for one in placed for piece in one.pieces), value.described, {})


def _placed(value: OneTensor, local: torch.Tensor, name: str) -> PlacedPieces:
    check_storable(local, name)
    shape = global_shape(value)
    placement = "replicate"
    mesh: dict[str, int] = {}
    if isinstance(value, Fragment):
        boxes = list(value.boxes)
        placement = value.described
    elif is_dtensor(value):
        boxes, placement, mesh = mesh_boxes(value, tuple(local.shape), name)
    else:
        boxes = [whole(shape)] if prod(shape) else []
    views = _flat_views(local, boxes) if isinstance(value, Fragment) and value.flat else _grid_views(local, boxes)
    factor = packing(local.dtype)
    if factor > 1:
        element_shape(local, name)  # refuses a 0-d float4
        boxes, shape = [_widened(box, factor) for box in boxes], (*shape[:-1], shape[-1] * factor)
    return PlacedPieces(shape, tuple(map(LivePiece, boxes, views)), placement, mesh, is_dtensor(value) and is_alone(value))


def _widened(box: Box, factor: int) -> Box:
    offset, shape = box
    return Box((*offset[:-1], offset[-1] * factor), (*shape[:-1], shape[-1] * factor))


def _flat_views(local: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    line = local.view(-1)
    ends = list(accumulate(box.volume for box in boxes))
    return [line[end - box.volume : end].view(box.shape) for box, end in zip(boxes, ends, strict=True)]


def _grid_views(local: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    if len(boxes) == 1:
        return [local]
    corners: list[dict[int, int]] = []  # per dimension: global offset -> local offset
    for dimension in range(local.dim()):
        blocks = sorted({(box.offset[dimension], box.shape[dimension]) for box in boxes})
        ends = accumulate(length for _, length in blocks)
        corners.append({offset: end - length for (offset, length), end in zip(blocks, ends, strict=True)})
    views = []
    for box in boxes:
        view = local
        for dimension, (offset, length) in enumerate(zip(*box, strict=True)):
            view = view.narrow(dimension, corners[dimension][offset], length)
        views.append(view)
    return views

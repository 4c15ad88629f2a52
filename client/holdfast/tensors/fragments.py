"""Determines which part of a global tensor a live tensor holds: plain tensors, DTensors, and shards declared by hand.

A framework's sharding becomes boxes, and views of the memory that holds them. No code outside this module needs to know
meshes. Nothing communicates: each rank computes its own boxes from torch's split rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.tensors.torch_dtypes import check_storable, element_shape, packing
from holdfast_formats.errors import InvalidRequest, StateMismatch
from holdfast_formats.region import Box, Shape, check_box, flat_boxes, whole

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Replicate, Shard

    _DTENSOR: tuple[type, ...] = (DTensor,)
else:
    _DTENSOR = ()

LAYOUTS_REMEMBERED = 1024

Run = tuple[int, int]  # global indices [start, stop) along one dimension


class Fragment:
    """A shard declared by hand: a live local tensor and its place in a global one of `shape`.

    It is the box whose corner is `offset` (and whose shape is the tensor's), or the elements [start, stop) of the row-major
    global tensor when `flat` is given. The tensor stays the caller's: saves read it, restores write into it. `held` is the
    parameter as the optimizer knows it, if that is another object.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        shape: Sequence[int],
        *,
        offset: Sequence[int] | None = None,
        flat: tuple[int, int] | None = None,
        held: torch.Tensor | None = None,
    ) -> None:
        if (offset is None) == (flat is None):
            raise InvalidRequest("a Fragment has either an offset or a flat range", hint="give offset= or flat=, not both")
        if is_dtensor(tensor):
            raise InvalidRequest(
                "a DTensor already describes its own placement", hint="pass it directly, without a Fragment"
            )
        self.tensor = tensor
        self.held = tensor if held is None else held
        self.shape: Shape = tuple(int(n) for n in shape)
        self.offset = None if offset is None else tuple(int(n) for n in offset)
        self.flat = None if flat is None else (int(flat[0]), int(flat[1]))
        _ = self.boxes  # refuses a place outside the shape now

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The boxes of the global tensor that the local one holds, in the order of its memory; elements are counted as in
        torch.
        """
        if self.offset is not None:
            box = Box(self.offset, tuple(self.tensor.shape))
            check_box(box, self.shape, "Fragment")
            return (box,) if box.volume else ()
        start, stop = self.flat or (0, 0)
        if not self.tensor.is_contiguous() or self.tensor.numel() != stop - start:
            raise StateMismatch(
                f"the flat range [{start}, {stop}) needs a contiguous tensor of {stop - start} elements, "
                f"not one of {self.tensor.numel()}{'' if self.tensor.is_contiguous() else ', not contiguous'}"
            )
        return tuple(flat_boxes(start, stop, self.shape))

    def with_tensor(self, tensor: torch.Tensor) -> Fragment:
        """The same place for another tensor of the same local shape."""
        return Fragment(tensor, self.shape, offset=self.offset, flat=self.flat)


Storable = torch.Tensor | Fragment


class LivePiece(NamedTuple):
    """A box of the global tensor and the live memory that holds it: writing into `tensor` writes the user's tensor.

    `tensor` is a detached view with the live dtype and the box's shape. torch counts float4 elements in pairs, so there it
    has half the box's last dimension.
    """

    box: Box
    tensor: torch.Tensor


class PlacedPieces(NamedTuple):
    """The part of a global tensor that a rank holds. `placement` is for people; `mesh` maps dimension names to sizes.

    `alone` means that, by its placements, no other rank holds any of it.
    """

    shape: Shape
    pieces: tuple[LivePiece, ...]
    placement: str
    mesh: dict[str, int]
    alone: bool = False


def is_dtensor(value: object) -> bool:
    return isinstance(value, _DTENSOR)


def local_tensor(value: Storable) -> torch.Tensor:
    """The memory of this rank behind a tensor, DTensor or Fragment; detached, and still the live memory."""
    if isinstance(value, Fragment):
        return value.tensor.detach()
    if is_dtensor(value):
        with torch.no_grad():  # outside autograd, to_local returns the local tensor itself
            return value.to_local().detach()  # type: ignore[attr-defined,no-any-return]
    return value if torch.nn.parameter.is_lazy(value) else value.detach()  # a lazy tensor has no memory, and raises


def global_shape(value: Storable) -> Shape:
    """The shape of the whole tensor, with elements counted as in torch."""
    return tuple(value.shape)


def pieces(value: Storable, name: str) -> PlacedPieces:
    """The boxes of `value` that this rank holds, as views of its live memory; empty if the rank holds nothing.

    Raises `InvalidRequest` by name for tensors that cannot be stored (a Partial placement, a layout without memory), and
    `StateMismatch` if a local tensor does not have the shape that follows from its placements.
    """
    return pieces_like(value, local_tensor(value), name)


def pieces_like(value: Storable, local: torch.Tensor, name: str) -> PlacedPieces:
    """The boxes of `value`, held by `local` instead of its own memory: per-shard state of a sharded parameter."""
    check_storable(local, name)
    shape = global_shape(value)
    placement = "replicate"
    mesh: dict[str, int] = {}
    if isinstance(value, Fragment):
        boxes = list(value.boxes)
        placement = f"box at {list(value.offset)}" if value.offset is not None else f"flat {list(value.flat or ())}"
    elif is_dtensor(value):
        boxes, placement, mesh = _mesh_boxes(value, tuple(local.shape), name)
    else:
        boxes = [whole(shape)] if prod(shape) else []
    views = _flat_views(local, boxes) if isinstance(value, Fragment) and value.flat else _grid_views(local, boxes)
    factor = packing(local.dtype)
    if factor > 1:
        element_shape(local, name)  # refuses a 0-d float4
        boxes, shape = [_widened(box, factor) for box in boxes], (*shape[:-1], shape[-1] * factor)
    return PlacedPieces(shape, tuple(map(LivePiece, boxes, views)), placement, mesh, is_dtensor(value) and _is_alone(value))


def _is_alone(value: Any) -> bool:
    """Whether the mesh of a DTensor has every rank, and shards it along every dimension that has more than one."""
    sizes = tuple(int(n) for n in value.device_mesh.shape)
    cut = all(n == 1 or not isinstance(placement, Replicate) for n, placement in zip(sizes, value.placements, strict=True))
    return cut and prod(sizes) == torch.distributed.get_world_size()


def _widened(box: Box, factor: int) -> Box:
    offset, shape = box
    return Box((*offset[:-1], offset[-1] * factor), (*shape[:-1], shape[-1] * factor))


def _flat_views(local: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Views of the boxes that follow one another in contiguous memory."""
    line = local.view(-1)
    ends = list(accumulate(box.volume for box in boxes))
    return [line[end - box.volume : end].view(box.shape) for box, end in zip(boxes, ends, strict=True)]


def _grid_views(local: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Views of the boxes that partition a local tensor as a grid: along each dimension, blocks in ascending order."""
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
    """Positions [begin, end) of the indices that `runs` lists; adjacent runs become one."""
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


def _mesh_boxes(value: Any, local: Shape, name: str) -> tuple[list[Box], str, dict[str, int]]:
    mesh, shape = value.device_mesh, tuple(value.shape)
    names = mesh.mesh_dim_names or tuple(f"mesh_{d}" for d in range(mesh.ndim))
    sizes = {dimension: int(n) for dimension, n in zip(names, mesh.shape, strict=True)}
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


@lru_cache(maxsize=LAYOUTS_REMEMBERED)
def _boxes(shape: Shape, local: Shape, splits: tuple[Split | None, ...]) -> tuple[Box, ...]:
    """The boxes that these cuts leave of a tensor, whatever its name; a model has few shapes and many tensors.

    Raises `ValueError` if the local tensor does not fit.
    """
    cuts = [[s for s in splits if s and s.dimension == d] for d in range(len(shape))]
    if 0 in local and 0 in (_length(split_runs(n, cut)) for n, cut in zip(shape, cuts, strict=True)):
        return ()  # torch gives an empty shard any shape
    runs = [_runs_along(d, shape[d], local, cuts[d]) for d in range(len(shape))]
    return tuple(
        Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell)) for cell in product(*runs)
    )


def _split(placement: Any, parts: int, part: int, name: str, dimensions: int) -> Split | None:
    if isinstance(placement, Replicate):
        return None
    factor = getattr(placement, "split_factor", None)  # of _StridedShard only; since torch 2.13 that is not a Shard
    if factor is None and not isinstance(placement, Shard):
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
    tensor_parallel_first = sorted(splits, key=lambda split: split.factor is not None)
    fully_sharded = split_runs(size, [split._replace(factor=None) for split in tensor_parallel_first])
    length = local[dimension] if dimension < len(local) else 0
    candidates = [candidate for candidate in (runs, fully_sharded) if _length(candidate) == length]
    if not candidates or any(candidate != candidates[0] for candidate in candidates):
        how = "fits two layouts" if candidates else "does not fit its placements"
        raise ValueError(f"a local length of {length} in dimension {dimension} of {size} {how} {splits}")
    return candidates[0]

"""Determines which part of a global tensor a live tensor holds: plain tensors, DTensors, and declared shards.

A framework's sharding becomes boxes, and views of the memory that holds them. Nothing communicates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

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
from holdfast.tensors.mesh_splits import is_alone, mesh_boxes
from holdfast.tensors.torch_dtypes import check_storable, element_shape, packing
from holdfast_formats.region import Box, Shape, whole


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

"""Determines which saved rank's values a rank of another world continues, if both have a layout.

Ranks have two kinds of own values. A *position* (a data loader's, a sampler's) belongs to a data-parallel index, which
is `sharding` and `dp` counted together as the ranks are. The rank that has that index now continues it, whatever its
number and the other axes. A *stream* (random numbers, a module's own state) belongs to a place: the same tp, cp, pp and
data-parallel index. If there was no such index or place, the coordinates are taken modulo the saved sizes, and the heir
is not exact: a position starts where another one started, and random streams are mixed with a number (`Mixing`).

Ranks of one data-parallel index train on the same rows, so they draw the same numbers for them. Ranks of one tensor-parallel
group compute the same activations outside of the divided layers, so they draw the same numbers for dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.mesh import ORDER, Coordinate, Mesh, arrange

_BEHIND = ("etp", "vpp")  # axes that number no ranks
_DIMENSIONS = {  # the axes of device meshes, as torch's documentation and the libraries above it call them
    **dict.fromkeys(("dp", "ddp", "dp_replicate", "replicate", "data", "data_parallel"), "dp"),
    **dict.fromkeys(("fsdp", "dp_shard", "shard"), "sharding"),
    **dict.fromkeys(("tp", "tensor_parallel"), "tp"),
    **dict.fromkeys(("cp", "context_parallel"), "cp"),
    **dict.fromkeys(("pp", "pipeline_parallel"), "pp"),
}


class Mixing(NamedTuple):
    """The numbers with which random streams are mixed, None for those that go on as they are: `process` for the streams of
    the process, which may choose rows, and `device` for those of devices, which dropout draws from.
    """

    process: int | None = None
    device: int | None = None


class SavedRankChoice(NamedTuple):
    """The saved rank that is continued. `exact`: it had the same index or place."""

    rank: int
    exact: bool
    mixing: Mixing = Mixing()


def stated(mesh: Mesh) -> dict[str, int]:
    """A layout's mesh as a manifest states it: the axes that number the ranks, innermost first, then the others."""
    return {axis: getattr(mesh, axis) for axis in (*mesh.order, *_BEHIND)}


def read(mesh: Mapping[str, int]) -> Mesh | None:
    """The mesh in a manifest; None if it was derived from the tensors, without a layout."""
    order = tuple(axis for axis in mesh if axis not in _BEHIND)
    if sorted(order) != sorted(ORDER) or not set(_BEHIND) <= set(mesh):
        return None
    try:
        return arrange(mesh, order)
    except InvalidRequest:
        return None


def of_dimensions(sizes: Mapping[str, int], world: int) -> Mesh | None:
    """The mesh of a world whose ranks are numbered row by row along these dimensions of a device mesh, outermost first.

    None if a name is unknown, or the dimensions do not have all ranks.
    """
    axes = {_DIMENSIONS.get(name): size for name, size in sizes.items()}
    if None in axes or len(axes) < len(sizes) or prod(sizes.values()) != world:
        return None
    known = {axis: size for axis, size in axes.items() if axis is not None}
    order = (*reversed(known), *(axis for axis in ORDER if axis not in known))
    try:
        return arrange(known, order)
    except InvalidRequest:
        return None


def indices(mesh: Mesh) -> int:
    return mesh.sharding * mesh.dp


def index(mesh: Mesh, at: Coordinate) -> int:
    if mesh.order.index("sharding") < mesh.order.index("dp"):
        return at.sharding + at.dp * mesh.sharding
    return at.dp + at.sharding * mesh.dp


def position(saved: Mesh, now: Mesh, rank: int) -> SavedRankChoice:
    """The saved rank whose data position a rank of the mesh `now` continues."""
    at = now.coordinate(rank)
    wanted = index(now, at)
    same = {axis: getattr(at, axis) if getattr(at, axis) < getattr(saved, axis) else 0 for axis in ("tp", "cp", "pp")}
    return SavedRankChoice(_rank(saved, wanted % indices(saved), same), wanted < indices(saved))


def stream(saved: Mesh, now: Mesh, rank: int) -> SavedRankChoice:
    """The saved rank whose streams a rank of the mesh `now` continues."""
    at = now.coordinate(rank)
    wanted = index(now, at)
    place = {axis: getattr(at, axis) % getattr(saved, axis) for axis in ("tp", "cp", "pp")}
    same_rows = wanted < indices(saved)
    same_group = same_rows and all(getattr(at, axis) == place[axis] for axis in ("cp", "pp"))
    group = now.rank(cp=at.cp, sharding=at.sharding, dp=at.dp, pp=at.pp)  # its first rank's number
    mixing = Mixing(None if same_rows else wanted, None if same_group else group)
    return SavedRankChoice(_rank(saved, wanted % indices(saved), place), same_group and at.tp == place["tp"], mixing)


def left(saved: Mesh, now: Mesh) -> range:
    """The data-parallel indices whose positions no rank continues, because there are fewer now."""
    return range(indices(now), indices(saved))


def _rank(mesh: Mesh, wanted: int, place: Mapping[str, int]) -> int:
    if mesh.order.index("sharding") < mesh.order.index("dp"):
        dp, sharding = divmod(wanted, mesh.sharding)
    else:
        sharding, dp = divmod(wanted, mesh.dp)
    return mesh.rank(sharding=sharding, dp=dp, **place)

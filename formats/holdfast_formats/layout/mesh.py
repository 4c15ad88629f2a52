"""The mesh of a layout: its axes, and the coordinates of each rank.

Ranks are numbered with the order's first axis innermost, as in Megatron-core (`RankGenerator` in
`megatron/core/parallel_state.py`). Experts see the same ranks through a second grid: `etp` is in the place of `tp`, there is
no `cp`, and what is left of all data parallelism after `ep` is split into its sharding and its replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import product
from math import gcd
from typing import NamedTuple

from holdfast_formats.errors import InvalidRequest

AXES = ("tp", "cp", "ep", "etp", "sharding", "dp", "pp", "vpp")
ORDER = ("tp", "cp", "ep", "sharding", "dp", "pp")
WORLD_MAX = 1 << 20  # ranks
STAGES_MAX = 1 << 12  # virtual pipeline stages
GRIDS_KEPT = 64
SHOWN_MAX = 40  # characters of a bad value that an error repeats

Grid = tuple[tuple[str, int, int], ...]  # axis, size, distance in ranks of one step along it; innermost first


class Coordinate(NamedTuple):
    """A rank's coordinates: on the dense grid (tp, cp, sharding, dp, pp), and on the experts' (etp, ep, edp, pp).

    `edp` counts all ranks that hold the same experts; `esharding` is the place among those that shard their optimizer.
    """

    tp: int
    cp: int
    sharding: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int
    esharding: int


class Mesh(NamedTuple):
    """The sizes of all axes and the order of ranks; `arrange` makes one that has been checked."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    sharding: int = 1
    order: tuple[str, ...] = ORDER

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.sharding * self.dp * self.pp

    @property
    def edp(self) -> int:
        return self.tp * self.cp * self.sharding * self.dp // (self.etp * self.ep)

    @property
    def esharding(self) -> int:
        """How many of those shard; the rest are replicas, as many as `dp` allows."""
        return self.edp // gcd(self.edp, self.dp)

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinates of the rank; `InvalidRequest` for a rank outside the world."""
        check_rank(rank, self.world)
        place = {axis: rank // step % size for axis, size, step in dense_grid(self)}
        place |= {axis: rank // step % size for axis, size, step in expert_grid(self)}
        replica = place.pop("ereplica")
        inner_first = self.order.index("sharding") < self.order.index("dp")
        sharding = place["esharding"]
        edp = sharding + replica * self.esharding if inner_first else replica + sharding * (self.edp // self.esharding)
        return Coordinate(**place, edp=edp)

    def rank(self, *, tp: int = 0, cp: int = 0, sharding: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank with these coordinates on the dense grid; `InvalidRequest`, naming the axis, for one outside it."""
        wanted = {"tp": tp, "cp": cp, "sharding": sharding, "dp": dp, "pp": pp}
        for axis, size, _ in dense_grid(self):
            if not 0 <= wanted[axis] < size:
                raise InvalidRequest(
                    f"{axis}={wanted[axis]} is not on an axis of {size}", hint=f"give {axis} from 0 to {size - 1}"
                )
        return sum(wanted[axis] * step for axis, _, step in dense_grid(self))

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one only along `axis`, including itself, in the order of the axis.

        It accepts every axis of either grid; `edp` is the experts' data parallelism, of which `esharding` is a part.
        """
        check_rank(rank, self.world)
        names = {"edp": ("esharding", "ereplica")}.get(axis, (axis,))
        steps = {name: (size, step) for name, size, step in (*dense_grid(self), *expert_grid(self)) if name in names}
        if len(steps) != len(names):
            known = ", ".join(name for name in Coordinate._fields)
            raise InvalidRequest(f"{axis!r} is not an axis of a mesh", hint=f"one of {known}")
        base = rank - sum(rank // step % size * step for size, step in steps.values())
        return tuple(sorted(base + sum(place) for place in product(*(range(0, n * s, s) for n, s in steps.values()))))


def check_rank(rank: int, world: int) -> int:
    """Return the rank, or raise `InvalidRequest`."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world:
        raise InvalidRequest(
            f"rank must be from 0 to {world - 1}, not {rank!r}",
            hint="the number of ranks is tp * cp * sharding * dp * pp of the layout",
        )
    return rank


@lru_cache(GRIDS_KEPT)
def dense_grid(mesh: Mesh) -> Grid:
    """The axes that number the ranks, innermost first."""
    return _steps((axis, getattr(mesh, axis)) for axis in mesh.order if axis != "ep")


@lru_cache(GRIDS_KEPT)
def expert_grid(mesh: Mesh) -> Grid:
    """The same ranks as experts see them."""
    sharding = mesh.esharding
    seen = {
        "tp": ("etp", mesh.etp),
        "ep": ("ep", mesh.ep),
        "sharding": ("esharding", sharding),
        "dp": ("ereplica", mesh.edp // sharding),
        "pp": ("pp", mesh.pp),
    }
    return _steps(seen[axis] for axis in mesh.order if axis != "cp")


def _steps(axes: Iterable[tuple[str, int]]) -> Grid:
    grid, step = [], 1
    for axis, size in axes:
        grid.append((axis, size, step))
        step *= size
    return tuple(grid)


def arrange(sizes: Mapping[str, int], order: Iterable[str] = ORDER) -> Mesh:
    """The checked mesh of these sizes in this order; axes that are not named have one rank.

    Equal arrangements of ranks give equal meshes, because axes of one rank are left out of the comparison. Raises
    `InvalidRequest` if the order lacks an axis, experts do not fit, or stages would differ between dense layers and experts.
    """
    for axis, size in sizes.items():
        if axis not in AXES or not 1 <= size <= WORLD_MAX:
            raise InvalidRequest(f"no axis of a mesh is {axis}={size}", hint=f"{', '.join(AXES)}: from 1 to {WORLD_MAX}")
    full = dict.fromkeys(AXES, 1) | dict(sizes)
    full["etp"] = sizes.get("etp", full["tp"])
    mesh = Mesh(**full, order=_complete(tuple(order), full))
    if mesh.world > WORLD_MAX:
        raise InvalidRequest(f"{mesh.world} ranks are too many for a mesh", hint=f"at most {WORLD_MAX}")
    if mesh.pp * mesh.vpp > STAGES_MAX:
        raise InvalidRequest(f"pp={mesh.pp} with vpp={mesh.vpp} makes too many stages", hint=f"at most {STAGES_MAX}")
    if mesh.vpp > 1 and mesh.pp == 1:
        raise InvalidRequest(f"vpp={mesh.vpp} needs pp of at least 2", hint="a single pipeline stage cannot be interleaved")
    _check_experts(mesh, "etp" in sizes)
    mesh = mesh._replace(order=_canonical(mesh))
    _check_stages(mesh)
    return mesh


def _check_experts(mesh: Mesh, is_stated: bool) -> None:
    ranks = mesh.tp * mesh.cp * mesh.sharding * mesh.dp
    if ranks % (mesh.etp * mesh.ep):
        default = "" if is_stated else " (etp defaults to tp)"
        raise InvalidRequest(
            f"etp={mesh.etp} with ep={mesh.ep} does not divide the {ranks} ranks of a stage{default}: "
            f"tp={mesh.tp}, cp={mesh.cp}, sharding={mesh.sharding}, dp={mesh.dp}",
            hint=f"choose an ep that divides {ranks}" if ranks % mesh.ep else "etp=1 does not split experts",
        )


def _check_stages(mesh: Mesh) -> None:
    dense, experts = ({axis: step for axis, _, step in grid}["pp"] for grid in (dense_grid(mesh), expert_grid(mesh)))
    if mesh.pp > 1 and dense != experts:
        raise InvalidRequest(
            f"in the order {'-'.join(told_order(mesh) or ORDER)} the next stage is {dense} ranks away for dense layers "
            f"and {experts} for experts (etp={mesh.etp}, ep={mesh.ep}, edp={mesh.edp})",
            hint="put pp last in the order",
        )


def _complete(order: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The order with all axes: `sharding` just inside `dp` and `ep` just inside `sharding` if they are not named."""
    for axis in order:
        if axis not in ORDER:
            raise InvalidRequest(f"an order has no axis {axis[:SHOWN_MAX]!r}", hint=f"it is made of {', '.join(ORDER)}")
    if len(set(order)) != len(order):
        raise InvalidRequest(f"the order {'-'.join(order)[:SHOWN_MAX]} names an axis twice", hint="name each axis once")
    missing = [axis for axis in ("tp", "cp", "dp", "pp") if axis not in order]
    lacking = [axis for axis in missing if sizes[axis] > 1]
    if lacking:
        raise InvalidRequest(
            f"the order {'-'.join(order)} lacks {lacking[0]}, which has {sizes[lacking[0]]} ranks", hint=f"add {lacking[0]}"
        )
    axes = [*order, *missing]
    for axis, outer in (("sharding", "dp"), ("ep", "sharding")):
        if axis not in axes:
            axes.insert(axes.index(outer), axis)
    return tuple(axes)


def _moving(mesh: Mesh) -> set[str]:
    """Axes along which ranks differ on either grid. Only their order affects ranks' coordinates."""
    place = {"etp": "tp", "esharding": "sharding", "ereplica": "dp"}
    return {place.get(axis, axis) for axis, size, _ in (*dense_grid(mesh), *expert_grid(mesh)) if size > 1}


def _canonical(mesh: Mesh) -> tuple[str, ...]:
    moving = _moving(mesh)
    ordered = [axis for axis in mesh.order if axis in moving]
    usual = [axis for axis in ORDER if axis in moving]
    return ORDER if ordered == usual else (*ordered, *(axis for axis in ORDER if axis not in moving))


def told_order(mesh: Mesh) -> tuple[str, ...]:
    """The part of a checked mesh's order that must be stated; () if it is the default."""
    moving = _moving(mesh)
    return () if mesh.order == ORDER else tuple(axis for axis in mesh.order if axis in moving)

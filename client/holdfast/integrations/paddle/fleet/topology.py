"""How fleet has arranged the ranks: which of them share rows, tensors and layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast_formats.errors import InvalidRequest
from holdfast_formats.layout.mesh import Mesh, arrange

# Paddle's names of the axes. Expert parallelism divides sharding in two, of which the outer one replicates the experts.
_AXES = {"data": "dp", "pipe": "pp", "sharding": "sharding", "sep": "cp", "context": "cp", "model": "tp"}
_OF_EXPERTS = {**_AXES, "moe_sharding": "dp", "dense_sharding": "sharding"}


def mesh_of(names: Sequence[str], sizes: Sequence[int]) -> Mesh | None:
    """The mesh of these axes, the outermost first; None for axes that it has no place for."""
    axes = _OF_EXPERTS if "dense_sharding" in names else _AXES
    several = [(name, size) for name, size in zip(names, sizes, strict=True) if size > 1]
    known = [(axes[name], size) for name, size in reversed(several) if name in axes]
    if len(dict(known)) < len(several):
        return None
    order = [axis for axis, _ in known]
    inside = order.index("pp") if "pp" in order else len(order)  # as a mesh expects it of axes without several ranks
    order[inside:inside] = [axis for axis in ("tp", "cp", "sharding", "dp", "pp") if axis not in order]
    try:
        return arrange(dict(known), order)
    except InvalidRequest:
        return None


def mesh_of_ranks(world: int) -> Mesh | None:
    """The mesh of this process's ranks, of which there are so many. Without `fleet.init` they share the data."""
    group = _group()
    if group is None:
        return Mesh(dp=world)
    if getattr(group, "_cp_degree", 1) > 1:  # inside of sharding, where its topology does not name it
        return None
    topology = group.topology()
    mesh = mesh_of(topology.get_hybrid_group_names(), topology._dims)
    return mesh if mesh is not None and mesh.world == world else None


def tensor_ranks() -> int:
    """How many ranks share a tensor."""
    group = _group()
    return 1 if group is None else int(group.get_model_parallel_world_size())


def _group() -> Any:
    from paddle.distributed import fleet

    group = getattr(fleet.fleet, "_hcg", None)
    return group if hasattr(group, "topology") else None  # that of static programs has none

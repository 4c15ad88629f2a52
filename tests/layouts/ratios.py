"""How many bytes the nodes of a layout read for each byte that their ranks need, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.read_planner import WantedBox, plan
from holdfast_formats.layout.language import parse
from holdfast_formats.layout.mesh import Mesh
from holdfast_formats.layout.rank_tensors import LayoutHoldings

from .realistic import Real

NODES = (8, 4, 2, 1)  # ranks
CONTIGUOUS_MAX, STRIDED_MAX = 1.05, 1.5

# Digests are of whole extents, and these nodes want a part of each: the most that any node reads for a byte it needs, by
# model, layout and ranks of a node. Column shards: 1/tp of every row. Thirds: extents that two nodes want.
EXCEEDING = {
    ("llama", "tp4-heads-shared", 1): 1.92,
    ("llama", "tp4-padded", 1): 1.92,
    ("llama", "fsdp2", 1): 1.09,
    ("neox", "tp4", 1): 2.20,
}


class Ratio(NamedTuple):
    """The bytes of all nodes of `node` ranks, the ratio of the node that reads most for what it needs, and the bar for it:
    another one where nodes cut tensor-parallel groups.
    """

    group: str
    node: int
    needed: int
    read: int
    worst: float
    bar: float


def ratios(real: Real, manifest: Manifest, text: str, group: str) -> Iterator[Ratio]:
    """One for each size of a node that differs: neighbouring ranks stand on one node, as launchers number them."""
    layout = parse(text)
    world = layout.mesh.world
    holding = LayoutHoldings(layout, group, real.groups[group], real.rules)
    ranks = [
        [WantedBox(group, part.tensor, part.box) for tensor in holding.of(rank).tensors for part in tensor.parts]
        for rank in range(world)
    ]
    for node in dict.fromkeys(min(node, world) for node in NODES):
        plans = [plan(manifest, [w for rank in ranks[at : at + node] for w in rank]) for at in range(0, world, node)]
        bar = CONTIGUOUS_MAX if _holds_groups(layout.mesh, node) else STRIDED_MAX
        worst = max(p.ratio for p in plans)
        yield Ratio(group, node, sum(p.needed for p in plans), sum(p.read for p in plans), worst, bar)


def _holds_groups(mesh: Mesh, node: int) -> bool:
    """Whether every tensor-parallel group lies inside a node."""
    groups = (mesh.peers(rank, axis) for rank in range(mesh.world) for axis in ("tp", "etp"))
    return all(len({rank // node for rank in group}) == 1 for group in groups)

"""How much is read for what is wanted, on the shapes of real models: the planner's arithmetic, no data.

Which layout saved a checkpoint does not matter: files do not depend on it (`test_matrix`). So what holds of the loaded
layout holds of every pair.
"""

from __future__ import annotations

from functools import cache
from math import prod

import pytest

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.read_planner import WantedBox, plan
from holdfast_formats.region import Box, whole

from .matrix import LAYOUTS
from .ratios import EXCEEDING, NODES, ratios
from .realistic import REAL, Real, manifest

CASES = [(model, name, group) for model, names in LAYOUTS.items() for name in names for group in ("model", "optim")]


@cache
def stored(model: str) -> tuple[Real, Manifest]:
    real = REAL[model]()
    return real, manifest(real.groups, real.whole_bytes)


@pytest.mark.parametrize(("model", "layout", "group"), CASES)
def test_a_node_reads_little_more_than_its_ranks_need(model: str, layout: str, group: str) -> None:
    """At most 1.05 bytes for one that is needed where tensor-parallel groups lie inside a node, and 1.5 where not; what
    cannot keep that is known by name, and reads no more than is stated.
    """
    for found in ratios(*stored(model), LAYOUTS[model][layout].text, group):
        known = EXCEEDING.get((model, layout, found.node), found.bar)
        assert 1 <= found.worst <= known, found


@pytest.mark.parametrize(("model", "layout", "node"), EXCEEDING)
def test_what_is_excepted_does_exceed_its_bar(model: str, layout: str, node: int) -> None:
    """No exception outlives its reason: one of the groups is above the bar, and near to what is stated."""
    held = [r for g in ("model", "optim") for r in ratios(*stored(model), LAYOUTS[model][layout].text, g) if r.node == node]
    worst = max(held, key=lambda found: found.worst)
    assert max(worst.bar, EXCEEDING[model, layout, node] - 0.02) < worst.worst


@pytest.mark.parametrize(("layout", "tp"), [("tp2", 2), ("tp4-heads-shared", 4)])
def test_a_column_shard_alone_costs_the_whole_tensor(layout: str, tp: int) -> None:
    """Rows, heads and vocabulary are read as they are needed; of what is cut by columns a node reads everything."""
    real, listed = stored("llama")
    sizes = {name: prod(shape) for name, (_, shape) in real.groups["model"].items()}
    columns = sum(size for name, size in sizes.items() if "o_proj" in name or "down_proj" in name) / sum(sizes.values())
    for node in (n for n in NODES if n < tp):
        found = next(r for r in ratios(real, listed, LAYOUTS["llama"][layout].text, "model") if r.node == node)
        assert found.read / found.needed == pytest.approx(1 + columns * (tp // node - 1), rel=0.01)


def test_every_extent_is_read_once_a_node_whoever_wants_it() -> None:
    """All ranks of a node that want the same tensor, or parts of it, cost one read of it."""
    _, listed = stored("llama")
    name = "model.layers.0.mlp.down_proj.weight"
    shape = listed.tensors["model"][name].shape
    once = plan(listed, [WantedBox("model", name, whole(shape))])
    halves = [WantedBox("model", name, Box((0, at), (shape[0], shape[1] // 2))) for at in (0, shape[1] // 2)]
    assert plan(listed, [*halves, *halves, WantedBox("model", name, whole(shape))]) == once
    assert plan(listed, halves) == once

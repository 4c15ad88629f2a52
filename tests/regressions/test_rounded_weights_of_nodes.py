"""Nodes that save together with `model="from-master"`: the files of a save that copied weights, and restores from memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast import Api, Fragment
from holdfast_formats import naming
from tests.daemons import wait_until
from tests.regressions import joint_worlds
from tests.regressions.joint_worlds import ranks
from tests.regressions.test_many_daemons import Site, site
from tests.regressions.test_peers_memory import lost, origins, spoil

__all__ = ["site"]
pytestmark = pytest.mark.usefixtures("forked_programs")

ROWS, COLUMNS = 264, 1200


def mixed(rank: int, world: int, step: int | None) -> dict[str, Any]:
    """Weights on every rank, flat ranges of their masters; columns of others; zeros without a step."""
    whole = (
        torch.linspace(-3, 3, ROWS * COLUMNS).reshape(ROWS, COLUMNS) + step
        if step is not None
        else torch.zeros(ROWS, COLUMNS)
    )
    start, stop = ROWS * COLUMNS * rank // world, ROWS * COLUMNS * (rank + 1) // world
    left, right = COLUMNS * rank // world, COLUMNS * (rank + 1) // world
    cut = whole[:, left:right] * 2
    return {
        "model": {"flat": whole.half(), "columns": Fragment(cut.bfloat16(), whole.shape, offset=(0, left))},
        "master": {
            "flat": Fragment(whole.reshape(-1)[start:stop].clone(), whole.shape, flat=(start, stop)),
            "columns": Fragment(cut.clone(), whole.shape, offset=(0, left)),
        },
    }


def test_two_nodes_and_other_arrangements(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks save. With every tensor of the root spoiled, other arrangements get every bit from memory."""
    monkeypatch.setenv("HOLDFAST_TAKE_OVER", "1")
    monkeypatch.setattr(joint_worlds, "state", mixed)
    a, b = site.start("a"), site.start("b")
    files: list[dict[str, bytes]] = []
    for run, options in (("copied", {}), ("run", {"model": "from-master"})):
        with ranks(run, [a, a, b, b], f"saved-{run}", **options) as world:
            for ticket in world.save(3):
                ticket.result(180)
            layouts = [one._contents.layout for one in world.checkpointers]
            assert all(any(leaf.rounded_from for leaf in layout.leaves) == bool(options) for layout in layouts)
            lost(world)
        with Api(a.url) as api:  # else who checks it finds it spoiled
            wait_until(lambda api=api, run=run: any(one.verified for one in api.checkpoints(run)))
        directory = site.root / naming.checkpoint_path(run, 3)
        files.append({file.name: file.read_bytes() for file in directory.glob("*.safetensors*")})
    assert files[0] == files[1] and "model.safetensors" in files[0]
    spoil(site)
    for name, places in (("more", [b, a, a, b, b]), ("one", [b])):
        with ranks("run", places, name) as world:
            assert set(world.each(lambda rank, one: one.restore())) == {3}
            world.check(3)
            found = origins(world)
            assert found["directory"] == 0 and found["peers"] > 0, found
            lost(world)

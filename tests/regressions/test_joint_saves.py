"""Ranks at the daemons of several nodes save one checkpoint, and restore it in any other arrangement."""

from __future__ import annotations

import pytest
import torch

from holdfast.rest.api import Api
from holdfast_formats import naming
from holdfast_service.daemon.checking.verifier import verify
from holdfast_service.storage.posix import PosixTier
from tests.regressions.joint_worlds import ranks, whole
from tests.regressions.test_many_daemons import Site, site, steps

__all__ = ["site"]
pytestmark = pytest.mark.usefixtures("forked_programs")


def test_ranks_of_two_nodes_save_one_checkpoint(site: Site) -> None:
    """Two ranks at each of two daemons: every step is one verified checkpoint, and restores bit for bit."""
    a, b = site.start("a"), site.start("b")
    with ranks("run", [a, a, b, b], "first") as world:
        for step in (1, 2, 3):
            for ticket in world.save(step):
                ticket.result()
    assert steps(site.root, "run") == [1, 2, 3]
    for step in (1, 2, 3):
        verify(PosixTier(site.root), naming.checkpoint_path("run", step))
    assert not list((site.root / "run" / naming.STAGING).iterdir())
    with ranks("run", [b, a], "second") as other:
        assert other.each(lambda rank, one: one.restore()) == [3, 3]
        other.check(3)
    with ranks("run", [a], "third") as alone:
        assert alone.each(lambda rank, one: one.restore(step=2)) == [2]
        alone.check(2)
        assert torch.equal(alone.states[0]["model"]["columns"].tensor, whole(2)["columns"])
    with Api(b.url) as api:
        assert [found.state for found in api.rounds("run")] == ["committed"] * 3
        assert api.checkpoint("run", 3).world == 4

"""Ranks over HTTP whose death no daemon hears of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer
from holdfast_formats import naming
from tests.daemons import wait_until
from tests.forked import Forked
from tests.regressions.test_many_daemons import Site, site, steps

__all__ = ["site"]
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("forked_programs")]
REMOTE_RANK = Path(__file__).parents[1] / "client" / "remote_rank.py"


def test_a_killed_job_is_followed_on_another_node(site: Site) -> None:
    """The next launch waits until the job counts as silent there, for half a minute, and goes on."""
    a, b = site.start("a"), site.start("b")
    with Forked([REMOTE_RANK, a.url, "one", 1, 1000]) as rank:
        wait_until(lambda: (site.root / naming.checkpoint_path("one", 1)).exists())
        rank.kill()
    state = {"model": {"w": torch.zeros(1000, dtype=torch.uint8)}}
    with Checkpointer("one", state, at=b.socket) as again:
        assert again.restore(groups=("model",)) == 1
        again.save(2, wait="durable").result()
    assert steps(site.root, "one") == [1, 2]

"""What several nodes have saved together, all of them read back: each a portion, whoever dies, is late, or meets damage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pytest
import torch

from holdfast.rest.api import Api
from holdfast_formats import naming
from tests.checkpoints import flip
from tests.daemons import wait_until
from tests.regressions.joint_worlds import Ranks, ranks
from tests.regressions.test_many_daemons import Daemon, Site, site, steps

__all__ = ["site"]
pytestmark = [
    pytest.mark.usefixtures("forked_programs"),
    pytest.mark.filterwarnings("ignore::holdfast.SaveWarning"),  # of saves that a test lets fail
]
RUN = "run"


def verified(daemon: Daemon, step: int) -> dict[str, object]:
    """What the check of this step says of itself, once it is verified."""
    with Api(daemon.url) as api:
        wait_until(lambda: api.checkpoint(RUN, step).verified, 60)
        return api.checkpoint(RUN, step).check or {}


def saved(world: Ranks, *numbers: int) -> None:
    for step in numbers:
        for ticket in world.save(step):
            ticket.result()


def test_every_node_reads_a_portion(site: Site) -> None:
    """And the others' portions are read as well where one of them is gone."""
    daemons = [site.start(name) for name in "abc"]
    with ranks(RUN, daemons, "first") as world:
        saved(world, 1, 2)
        for step in (1, 2):
            check = verified(daemons[0], step)
            assert check["nodes"] == 3
        assert left(site) == 0


def left(site: Site) -> int:
    """How many rows of shared checks there are."""
    with psycopg.connect(site.url.replace("postgresql+psycopg", "postgresql")) as connection:
        (count,) = connection.execute("SELECT (SELECT count(*) FROM portions) + (SELECT count(*) FROM shared_checks)").fetchone()
        return int(count)

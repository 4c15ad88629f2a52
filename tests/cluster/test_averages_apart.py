"""Daemons of two nodes keep an average of ranks that train apart between two syncs: it is saved where it is one, and left
out by name where it is not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import httpx
import pytest

from holdfast.read.root_directory import open_checkpoint
from tests.daemons import wait_until
from tests.regressions.test_averages_of_nodes import RUN, World, check
from tests.regressions.test_many_daemons import Daemon, Site, site

__all__ = ["site"]
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("forked_programs")]


def save(world: World, step: int) -> set[tuple[str, ...]]:
    """Save on all ranks; the groups that their tickets name at the end."""
    tickets = world.save(step)
    for ticket in tickets:
        ticket.result(120)
    return {tuple(ticket.groups) for ticket in tickets}


def check_without(site: Site, step: int) -> None:
    """The checkpoint is whole, and has no average."""
    with open_checkpoint(site.root, None, RUN, step) as reader:
        assert reader.verify() == [] and "ema" not in reader.manifest.groups and "master" in reader.manifest.groups


def told(daemon: Daemon) -> list[dict[str, Any]]:
    """What is told of saves without their average, oldest first."""
    asked = {"run": RUN, "kind": "average-left-out"}
    found = httpx.get(f"{daemon.url}/v1/events", params=asked, trust_env=False).raise_for_status().json()["items"]
    return list(reversed(found))


@pytest.mark.parametrize("apart", [{3}, {2, 3}, {1, 3}], ids=["a rank of a node", "a whole node", "a rank of each node"])
def test_ranks_of_two_nodes_that_train_apart(site: Site, apart: Collection[int]) -> None:
    """They agree when they save, but not in what was averaged: also after a daemon is another one, until they restore an
    average that is one.
    """
    a, b = site.start("a"), site.start("b")
    world = World([a, a, b, b], "apart")
    world.train(1)
    world.settle(1)
    assert save(world, 1) == {("master", "ema", "extra")}
    check(site, 1, [1], dropped=0, lost=0)
    world.train(2, apart=apart)
    world.settle(2)
    assert save(world, 2) == {("master", "extra")}
    wait_until(lambda: [one["step"] for one in told(a)] == [2])
    b.kill()
    b = site.start("b")
    world.train(3)
    world.settle(3)
    assert save(world, 3) == {("master", "extra")}
    for step in (2, 3):
        check_without(site, step)
    wait_until(lambda: [one["step"] for one in told(a)] == [2, 3])
    ranks = ", ".join(map(str, sorted(apart)))
    named = f"ema/alike on rank{'s' if len(apart) > 1 else ''} {ranks} differs from lower ranks"
    assert all("differ where they must be equal" in one["text"] for one in told(b))
    assert any(named in daemon.log.read_text() for daemon in site.daemons)
    world.close()
    world = World([b, a], "again")
    assert world.restore(step=1) == [1, 1]
    world.train(2)
    world.settle(2)
    assert save(world, 4) == {("master", "ema", "extra")}
    world.close()
    check(site, 4, [1, 2], dropped=0, lost=0)

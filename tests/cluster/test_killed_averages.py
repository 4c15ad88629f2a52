"""Three nodes keep one average, and a daemon is killed at each named point of an update and of a save: no bit is another."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from holdfast.read.root_directory import open_checkpoint
from tests.cluster.test_named_points import Marks, marks_at
from tests.crash import test_averages as alone
from tests.daemons import wait_until
from tests.regressions.test_averages_of_nodes import RUN, World, check, expected
from tests.regressions.test_many_daemons import Site, site

__all__ = ["site"]
pytestmark = [pytest.mark.cluster, pytest.mark.cluster_slow]

NODES = ("a", "b", "c")
SIZE = 2_400_011  # three chunks and a bit on each rank
POINTS = ("before voting", "voted", *alone.POINTS)


marks = marks_at(POINTS)


def test_a_daemon_is_killed_at_every_point(site: Site, marks: Marks) -> None:
    """It is started again at once; every step is in the average, on all nodes, in the save of this step and in the next."""
    daemons = {name: site.start(name) for name in NODES}
    world = World([daemons[name] for name in NODES], "killed", size=SIZE)
    world.train(1)
    world.settle(1)
    for number, point in enumerate(POINTS):
        step = 2 * number + 2
        marks.arm(point)
        world.train(step)
        tickets = world.save(step)
        victim = marks.victim(daemons)
        daemons[victim].kill()
        daemons[victim] = site.start(victim)
        for ticket in tickets:
            ticket.result(120)
        world.settle(step)
        world.train(step + 1)
        world.settle(step + 1)
        check(site, step, range(1, step + 1), SIZE, dropped=0, lost=0)
    for ticket in world.save(step + 1):
        ticket.result(120)
    world.close()
    check(site, step + 1, range(1, step + 2), SIZE, dropped=0, lost=0)


@pytest.mark.parametrize("point", ["voted", "recorded, not freed", "average in the slot"])
def test_a_node_that_is_away_for_a_while(site: Site, marks: Marks, point: str) -> None:
    """Its daemon is dead while the others train on: what they bring meanwhile is left out by all, and then it goes on."""
    daemons = {name: site.start(name) for name in NODES}
    world = World([daemons[name] for name in NODES], "killed", size=SIZE)
    for step in (1, 2):
        world.train(step)
        world.settle(step)
    marks.arm(point)
    world.train(3)
    tickets = world.save(3)
    victim = marks.victim(daemons)
    daemons[victim].kill()
    for step in (4, 5, 6):
        world.train(step)
    daemons[victim] = site.start(victim)
    for ticket in tickets:
        ticket.result(120)
    check(site, 3, range(1, 4), SIZE, dropped=0, lost=0)
    wait_until(lambda: all(one.ema.ready for one in world.checkpointers))
    world.train(7)
    wait_until(lambda: all(one.ema.ready for one in world.checkpointers))
    counts = {one.ema.n for one in world.checkpointers}
    assert len(counts) == 1
    for ticket in world.save(7):
        ticket.result(120)
    (n,) = {one.ema.n for one in world.checkpointers}
    assert {n} == counts
    world.close()
    with open_checkpoint(site.root, None, RUN, 7) as reader:
        found = torch.from_numpy(reader.read("ema", "cut").copy())
    of = [[1, 2, 3, *later] for later in combinations((4, 5, 6, 7), n - 3)]
    assert any(torch.equal(found, expected(steps, SIZE)["cut"]) for steps in of)  # of the same ones on all nodes

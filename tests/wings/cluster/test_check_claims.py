"""Of several nodes that scrub, each reads other checkpoints; what one finds that has stood still counts no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from holdfast_formats.errors import CorruptExtent
from holdfast_formats.naming import CheckpointId
from holdfast_service.daemon import scrub as scrubbing
from holdfast_service.daemon.saving.saver import Saver
from holdfast_service.daemon.scrub import Scrub, ScrubPlan
from holdfast_service.wings.cluster.check_claims import CheckClaims, duty_of
from tests.daemons import wait_until
from tests.wings.cluster.nodes import Nodes, nodes
from tests.wings.cluster.spread_world import RUN, SpreadNode, SpreadWorld

__all__ = ["nodes"]
STEPS = range(1, 7)
PLACES = [CheckpointId(RUN, step) for step in STEPS]


@pytest.fixture
def world(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SpreadWorld]:
    monkeypatch.setattr(scrubbing, "LOOK_S", 0.2)
    made = SpreadWorld(nodes, tmp_path)
    for name in "ab":
        made.add(name, ready=False)
    yield made
    made.close()


def claims_of(node: SpreadNode) -> CheckClaims:
    return CheckClaims(node.cluster.duties)


def a_scrub(node: SpreadNode, stack: ExitStack, every_s: float) -> Scrub:
    saver = stack.enter_context(closing(Saver(node.tier, node.control, node.cluster.node, node.checker)))
    made = Scrub(node.checker, node.control, saver, ScrubPlan(10**12, every_s), claims_of(node))
    return stack.enter_context(closing(made))


def test_each_takes_another_one(world: SpreadWorld) -> None:
    """The first that is free; one that was left, and one of a node that is gone, are free again."""
    a, b = (claims_of(node) for node in world.all)
    assert [one.take(PLACES[:3]) for one in (a, b, a, b)] == [*PLACES[:3], None]
    b.leave(PLACES[1])
    a.leave(PLACES[1])
    assert b.take(PLACES[:3]) == PLACES[1]
    b.leave(PLACES[0])  # another one's
    assert b.take(PLACES[:1]) is None
    world._nodes.lapse(world.all[0].cluster)
    assert b.take(PLACES) == PLACES[0]


def test_names_fit(world: SpreadWorld) -> None:
    """Of a run with a long name too; and different checkpoints have different ones."""
    long = [CheckpointId("r" * 128, step) for step in (1, 2)]
    assert len({duty_of(place) for place in long}) == 2 and duty_of(PLACES[0]) == "scrub run@1"
    claims = claims_of(world.all[0])
    assert [claims.take(long), claims.take(long)] == long


def test_two_nodes_read_everything_once(world: SpreadWorld) -> None:
    """Both at the same time; each tells of what it has read, and no claim is left."""
    for step in STEPS:
        world.commit(step)
    both = threading.Barrier(2)
    for node in world.all:
        node.heed = lambda size: None
    size = sum(world.known(step).bytes for step in STEPS)
    with ExitStack() as stack:
        for node in world.all:
            checker, check, first = node.checker, node.checker.check, [True]

            def checking(*args: object, check=check, first=first, **named: object) -> object:  # type: ignore[no-untyped-def]
                if first.pop() if first else False:
                    both.wait(180)  # so that neither has done everything before the other one begins
                return check(*args, **named)

            checker.check = checking  # type: ignore[method-assign]
            a_scrub(node, stack, 3600.0)
        wait_until(lambda: all(world.known(step).verified for step in STEPS))
    read = [node.checker.counts.all()["bytes"] for node in world.all]
    assert sum(read) == size and min(read) > 0
    assert len(world.events("checkpoint-verified")) == len(STEPS)
    assert all(not member.duties for member in world.all[0].cluster.membership.members())


def test_one_that_has_stood_still_says_nothing(world: SpreadWorld) -> None:
    """Its claim has ended in the middle of a check: neither that it is sound nor that it is damaged counts."""
    a, b = (claims_of(node) for node in world.all)
    world.commit(1)
    assert a.take(PLACES[:1]) == PLACES[0]
    fence = a.fence(PLACES[0])
    world._nodes.lapse(world.all[0].cluster)
    world.all[0].checker.check(RUN, 1, fence=fence)
    world.all[0].control.findings.damaged(RUN, 1, CorruptExtent("it is not"), checked=True, fence=fence)
    assert world.known(1).unchecked
    assert b.take(PLACES[:1]) == PLACES[0]
    world.all[1].checker.check(RUN, 1, fence=b.fence(PLACES[0]))
    assert world.known(1).verified


def test_what_a_dead_node_left_unchecked(world: SpreadWorld) -> None:
    """It is not read at the first look, since whoever has committed it may be about to."""
    world.commit(1)
    with ExitStack() as stack:
        scrub = a_scrub(world.all[1], stack, 3600.0)
        wait_until(lambda: world.known(1).verified)
        assert scrub is not None
    assert len(world.events("checkpoint-verified")) == 1

"""A share that its node cannot write, on a real PostgreSQL: one node is asked for, one takes it, once in a round."""

from __future__ import annotations

import threading

from sqlalchemy import update

from holdfast_formats.errors import NoSpace, RoundAborted
from holdfast_formats.staging.joint import ShareHandover
from holdfast_service.control.database.cluster_schema import JointRoundRow
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.membership import later
from tests.wings.cluster.nodes import Nodes, nodes
from tests.wings.cluster.test_rendezvous import sealed

__all__ = ["nodes"]
WHY = NoSpace("on node a: the disk is full", node="a").problem()


def test_from_the_question_to_the_commit(nodes: Nodes) -> None:
    """All see who cannot and why; who has written its own share takes it over, and its receipt is that of the share."""
    a, b, c = (nodes.add(name) for name in "abc")
    number = sealed(a, b, c)
    assert b.rendezvous.state(number).handover is None and not b.rendezvous.help(number)
    assert a.rendezvous.hand_over(number, WHY)
    assert not b.rendezvous.help(number)  # its own share comes first
    for node in (b, c):
        node.rendezvous.deliver(number, node.membership.me.name.encode())
    assert not a.rendezvous.help(number) and not a.rendezvous.state(number).delivered
    assert b.rendezvous.help(number) and b.rendezvous.help(number) and not c.rendezvous.help(number)
    for node in (a, b, c):
        assert node.rendezvous.state(number).handover == ShareHandover("a", WHY, "b", False)
        assert node.rendezvous.rounds(number).handover == ShareHandover("a", WHY, "b", False)
    assert not b.rendezvous.claim(number)
    c.rendezvous.deliver(number, b"not asked", "a")
    b.rendezvous.deliver(number, b"not its own", "c")
    assert not c.rendezvous.claim(number)
    b.rendezvous.deliver(number, b"for a", "a")
    assert a.rendezvous.state(number).delivered and a.rendezvous.state(number).written
    assert c.rendezvous.claim(number) and c.rendezvous.receipts(number) == [b"for a", b"b", b"c"]


def test_who_has_said_that_it_cannot_delivers_nothing(nodes: Nodes) -> None:
    """Also after its daemon was started again: no other node's writing comes together with its own (I11)."""
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    assert a.rendezvous.hand_over(number, WHY)
    a.rendezvous.deliver(number, b"late")
    nodes.lapse(a)
    a.membership.beat()
    a.rendezvous.deliver(number, b"late, by another boot")
    b.rendezvous.deliver(number, b"b")
    assert not a.rendezvous.state(number).delivered and not b.rendezvous.claim(number)


def test_it_happens_once_in_a_round(nodes: Nodes) -> None:
    """A second node that cannot write is told so, and a question whose answer was lost stands as it was."""
    a, b, c = (nodes.add(name) for name in "abc")
    number = sealed(a, b, c)
    assert a.rendezvous.hand_over(number, WHY)
    assert not b.rendezvous.hand_over(number, WHY) and not a.rendezvous.hand_over(number, WHY)
    assert c.rendezvous.state(number).handover == ShareHandover("a", WHY, None, False)


def test_a_share_is_handed_over_only_while_it_can_be_written(nodes: Nodes) -> None:
    """Not where no other node is there, nor what was delivered, nor of a round that has ended."""
    a, b = nodes.add("a"), nodes.add("b")
    alone = sealed(a, b)
    nodes.lapse(b)
    assert not a.rendezvous.hand_over(alone, WHY)
    b.membership.beat()
    done = sealed(a, b, step=2)
    a.rendezvous.deliver(done, b"a")
    assert not a.rendezvous.hand_over(done, WHY)
    ended = sealed(a, b, step=3)
    b.rendezvous.deliver(ended, b"b")
    assert a.rendezvous.hand_over(ended, WHY)
    assert a.rendezvous.abort(ended, RoundAborted("over").problem())
    assert not b.rendezvous.help(ended)


def test_a_silent_helper_is_seen_by_the_clock_of_the_database(nodes: Nodes) -> None:
    """It is in time again as soon as it says so."""
    a, b = nodes.add("a"), nodes.add("b")
    number = sealed(a, b)
    b.rendezvous.deliver(number, b"b")
    assert a.rendezvous.hand_over(number, WHY) and b.rendezvous.help(number)
    with a.database.write() as session:
        session.execute(update(JointRoundRow).values(helped_until=later(-1)))
    seen = a.rendezvous.rounds(number).handover
    assert seen is not None and seen.overdue
    assert b.rendezvous.help(number)
    seen = a.rendezvous.state(number).handover
    assert seen is not None and not seen.overdue


def test_of_many_that_would_help_one_does(nodes: Nodes) -> None:
    """Twenty races of three nodes."""
    a, *others = (nodes.add(name) for name in "abcd")
    for step in range(1, 21):
        number = sealed(a, *others, step=step)
        assert a.rendezvous.hand_over(number, WHY)
        for node in others:
            node.rendezvous.deliver(number, b"done")
        got: list[bool] = []
        start = threading.Barrier(len(others))

        def race(node: Cluster) -> None:
            start.wait()  # noqa: B023
            got.append(node.rendezvous.help(number))  # noqa: B023

        threads = [threading.Thread(target=race, args=(node,)) for node in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == [False, False, True]

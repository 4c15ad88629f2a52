"""What nodes tell each other: whose ranks are where, and what is being read."""

from __future__ import annotations

import threading

from sqlalchemy import update

from holdfast_service.control.database.cluster_schema import HoldRow
from holdfast_service.control.database.visible import limited_to
from holdfast_service.control.nodes import deciding
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.membership import later
from holdfast_service.wings.cluster.node_ranks import LATE_S, NodeRanks
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]


def elsewhere(cluster: Cluster, run: str) -> dict[str, NodeRanks]:
    with cluster.database.apart() as session:
        return cluster.node_ranks.elsewhere(session, run)


def arrive(cluster: Cluster, run: str, rank_set: NodeRanks) -> None:
    with cluster.database.apart() as session:
        cluster.node_ranks.arrive(session, run, rank_set)


def test_ranks_are_seen_from_other_nodes(nodes: Nodes) -> None:
    """From the moment that they are let in, until they are gone; one's own are not elsewhere. Whether one that was let in
    certainly lives, or was killed since, is said by the next beat: the others ask again after that.
    """
    a, b = nodes.add("a"), nodes.add("b")
    arrived = NodeRanks(1, 8, 1, a.membership.beat_s + LATE_S)
    arrive(a, "run", NodeRanks(1, 8, 1))
    assert elsewhere(b, "run") == {"a": arrived} and elsewhere(a, "run") == {} == elsewhere(b, "other")
    a.node_ranks.report({})  # a rank that was let in and has not connected yet is not forgotten
    assert elsewhere(b, "run") == {"a": arrived}
    connected = {"run": NodeRanks(2, 8, 8)}
    a.node_ranks.report(connected)
    assert elsewhere(b, "run") == {"a": NodeRanks(2, 8, 8)} and b.node_ranks.by_node() == {"a": {"run": 8}}
    with limited_to("other*"):
        assert b.node_ranks.by_node() == {}
    connected = {}
    a.node_ranks.parted("run")
    a.node_ranks.report(connected)
    assert elsewhere(b, "run") == {}


def test_silent_ranks_count_as_gone_by_and_by(nodes: Nodes) -> None:
    """As their node says of ranks over HTTP; and those of a node that has missed a beat, when its lease ends."""
    a, b = (nodes.add(name, lease_s=600.0, beat_s=200.0) for name in ("a", "b"))
    connected = {"run": NodeRanks(1, 8, 8, 500.5)}
    a.node_ranks.report(connected)
    assert elsewhere(b, "run") == {"a": NodeRanks(1, 8, 8, 500.5)}
    nodes.left(a, 300)
    assert 0 < (elsewhere(b, "run")["a"].left_s or 0) < 300
    nodes.left(a, 600)
    connected = {"run": NodeRanks(1, 8, 8)}
    a.node_ranks.report(connected)
    assert elsewhere(b, "run") == {"a": NodeRanks(1, 8, 8)}


def test_ranks_of_a_node_that_is_gone_are_gone(nodes: Nodes) -> None:
    """Nobody is kept out of a run by a node that nobody hears any more."""
    a, b = nodes.add("a"), nodes.add("b")
    arrive(a, "run", NodeRanks(1, 8, 8))
    nodes.lapse(a)
    assert elsewhere(b, "run") == {}


def test_what_is_read_by_way_of_a_node_is_held_for_all(nodes: Nodes) -> None:
    """Until a beat finds that it is read no more, or the hold ends because there are no beats."""
    a, b = nodes.add("a"), nodes.add("b")
    a.holds.announce("run", 1, False)
    a.holds.announce("run", 2, True)
    assert set(b.holds.elsewhere("run")) == {1, 2} and a.holds.elsewhere("run") == {}
    assert set(b.holds.elsewhere("run", opened=False)) == {1}
    reading = {("run", 2): False, ("run", 3): True}
    a.holds.renew(reading)
    assert set(b.holds.elsewhere("run")) == {2, 3} and set(b.holds.elsewhere("run", opened=False)) == {2}
    with a.database.apart() as session:
        session.execute(update(HoldRow).values(until=later(-1)))
    assert b.holds.elsewhere("run") == {}


def test_a_reader_waits_for_a_removal_that_is_being_decided(nodes: Nodes) -> None:
    """What is announced while another node decides is announced behind it, so each sees what the other did (I16)."""
    a, b = nodes.add("a"), nodes.add("b")
    told = threading.Event()

    def read() -> None:
        a.holds.announce("run", 1, False)
        told.set()

    with b.locks.locked(deciding("run")):
        thread = threading.Thread(target=read)
        thread.start()
        assert not told.wait(0.3) and b.holds.elsewhere("run") == {}
    thread.join(180)
    assert set(b.holds.elsewhere("run")) == {1}


def test_readers_do_not_wait_for_each_other(nodes: Nodes) -> None:
    """Of one run, on several nodes."""
    a, b = nodes.add("a"), nodes.add("b")
    with a.locks.locked(deciding("run"), shared=True):
        b.holds.announce("run", 1, False)
    assert set(a.holds.elsewhere("run")) == {1}


def test_without_the_catalog_a_reader_reads(nodes: Nodes) -> None:
    """Nobody can be told, and nobody can decide on a removal either."""
    away = Cluster(nodes.add("a").database.at("postgresql://nobody@127.0.0.1:1/none"), "b")
    away.holds.announce("run", 1, False)
    away.close()


def test_all_nodes_have_one_secret(nodes: Nodes) -> None:
    """The first makes it, also when many ask at once; another cluster has another one."""
    made = [nodes.add(name) for name in "abc"]
    found = {node.secrets() for node in made}
    assert len(found) == 1 and [len(one) >= 32 for one in found.pop()] == [True]


def test_a_rotated_secret_is_good_until_the_next_rotation(nodes: Nodes) -> None:
    """So that nodes that have not heard of it yet are still understood. Another rotation ends it."""
    a, b = nodes.add("a"), nodes.add("b")
    a.rotate_secret()  # also where none was made yet
    first = b.secrets()
    a.rotate_secret()
    second = b.secrets()
    assert len(set(second)) == 2 and second[1] == first[0] and a.secrets() == second
    b.rotate_secret()
    third = a.secrets()
    assert third[1] == second[0] and not {*first} & {*third}

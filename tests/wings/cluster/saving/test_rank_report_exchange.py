"""What daemons of several nodes agree on for their ranks, by a real PostgreSQL: one step, also after one was replaced."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from holdfast_formats.staging.messages import PassedStep
from holdfast_service.daemon.saving.connected_ranks import ConnectedRanks
from holdfast_service.daemon.saving.other_nodes import LocalRanks
from holdfast_service.daemon.saving.rounds import LaunchKey, Participant
from holdfast_service.daemon.saving.stop_agreement import StopAgreement
from holdfast_service.wings.cluster.cluster import Cluster
from holdfast_service.wings.cluster.saving.rank_report_exchange import RankReportExchange
from tests.daemons import wait_until
from tests.wings.cluster.nodes import Nodes, nodes

__all__ = ["nodes"]
KEY = LaunchKey("run", 1)


class Node:
    """The ranks at one daemon, and what it has agreed on for them."""

    def __init__(self, cluster: Cluster, world: int, ranks: Sequence[int]) -> None:
        self.asked: set[int] = set()
        self.connected = ConnectedRanks(threading.Condition())
        self.ranks = {rank: self._rank(rank, world) for rank in ranks}
        self.stops = StopAgreement(self.connected, lambda: self.exchange.look())
        here = LocalRanks(lambda: {KEY}, dict, lambda key, said, others: None)
        self.exchange = RankReportExchange(cluster.words, cluster.node, here, self.stops)

    def _rank(self, rank: int, world: int) -> Participant:
        who = Participant(*KEY[:1], rank, world, KEY.attempt, lambda outcome: None)
        who.ask_to_stop = lambda: self.asked.add(rank)  # type: ignore[method-assign]
        self.connected.join(who)
        return who

    def tell(self, rank: int, passed: int) -> int | None:
        return self.stops.report(self.ranks[rank], PassedStep(passed=passed)).step

    def leave(self, rank: int) -> None:
        """It closes in order."""
        self.ranks[rank].part()
        self.connected.leave(self.ranks[rank])


@contextmanager
def node(cluster: Cluster, world: int, ranks: Sequence[int]) -> Iterator[Node]:
    made = Node(cluster, world, ranks)
    try:
        yield made
    finally:
        made.exchange.close()


def test_ranks_of_the_other_node_are_asked_and_all_get_one_step(nodes: Nodes) -> None:
    """As soon as some node has said that the launch is to stop."""
    with node(nodes.add("a"), 3, [0, 1]) as a, node(nodes.add("b"), 3, [2]) as b:
        assert a.tell(0, 4) is None
        wait_until(lambda: bool(b.exchange.look()) or b.asked == {2})
        assert a.tell(1, 3) is None and b.tell(2, 9) is None
        wait_until(lambda: (a.tell(0, 4), a.tell(1, 3), b.tell(2, 9)) == (10, 10, 10))


def test_what_a_rank_has_said_to_the_daemon_before_counts(nodes: Nodes) -> None:
    """That rank has ended meanwhile, and does not say it again."""
    cluster = nodes.add("b")
    with node(cluster, 3, [1, 2]) as before:
        before.tell(2, 9)
        wait_until(lambda: any("2" in word.said["passed"] for word in cluster.words.reports(*KEY, "stopping")))
    with node(nodes.add("a"), 3, [0]) as a, node(cluster, 3, [1, 2]) as b:
        b.leave(2)
        wait_until(lambda: (a.tell(0, 4), b.tell(1, 5)) == (10, 10))

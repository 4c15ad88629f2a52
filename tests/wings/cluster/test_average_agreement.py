"""Nodes agree which updates count: all votes, all orders in which they are told and read, and a catalog that forgets."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from holdfast_formats.errors import CatalogUnavailable
from holdfast_formats.staging.joint import AverageVote
from holdfast_service.daemon.averaging.rank_set import RankSetKey
from holdfast_service.wings.cluster.average_agreement import Agreement, verdict
from tests.daemons import wait_until

KEY = RankSetKey("r", 1, 3)


class ModelNode:
    """A node with one rank, which brings certain updates; and what it has read of the others."""

    def __init__(self, rank: int, brings: Sequence[bool], table: list[list[AverageVote]]) -> None:
        self.rank, self.brings, self.table = rank, brings, table
        self.folded: list[int] = []
        self.number = 1
        self.told: AverageVote | None = None
        self.wanted = self.vote
        self.others: list[AverageVote] = []

    @property
    def is_through(self) -> bool:
        return self.number > len(self.brings)

    @property
    def vote(self) -> AverageVote:
        history = f"h{len(self.folded)}" if self.brings[self.number - 1] else ""
        return AverageVote((self.rank,), self.number, history, self.folded[-1] if self.folded else 0)

    def cast(self) -> None:
        """Tell the vote, and read what the others have told."""
        self.told = self.wanted if self.is_through else self.vote  # the last word is told even by who is through
        self.table[self.rank].append(self.told)
        self.others = [rows[-1] for rank, rows in enumerate(self.table) if rank != self.rank and rows]

    def deal(self) -> None:
        """Deal with the next update, if it is known whether it counts."""
        if self.is_through:
            return
        self.wanted = vote = self.vote
        counts = verdict(vote, self.others, len(self.table)) if vote.history == "" or vote == self.told else None
        if counts is None:
            return
        if counts:
            self.folded.append(self.number)
        self.number += 1


@given(st.data())
def test_all_nodes_fold_the_same_updates(data: st.DataObject) -> None:
    """Those that all bring, in whatever order nodes tell, read and go on, although the catalog loses what it was told last;
    and no node waits for ever.
    """
    nodes = data.draw(st.integers(2, 4))
    updates = data.draw(st.integers(1, 6))
    table: list[list[AverageVote]] = [[] for _ in range(nodes)]
    votes = [data.draw(st.lists(st.booleans(), min_size=updates, max_size=updates)) for _ in range(nodes)]
    world = [ModelNode(rank, brings, table) for rank, brings in enumerate(votes)]
    for kind, rank in data.draw(st.lists(st.tuples(st.sampled_from("cdcdl"), st.integers(0, nodes - 1)), max_size=60)):
        if kind == "c":
            world[rank].cast()
        elif kind == "d":
            world[rank].deal()
        elif table[rank]:
            table[rank].pop()
    for _ in range(2 * updates * nodes + 2):
        for node in world:
            node.cast()
            node.deal()
    # What the last update of a node was is only known by what it says next; then it has nothing more to say.
    counted = [number for number in range(1, updates + 1) if all(brings[number - 1] for brings in votes)]
    for node in world:
        assert node.folded == counted[: len(node.folded)]
    assert max(len(node.folded) for node in world) == len(counted)
    assert all(node.number >= updates for node in world)


def vote(rank: int, number: int, history: str = "h", folded: int = 0) -> AverageVote:
    return AverageVote((rank,), number, history, folded)


def test_another_history_is_another_update() -> None:
    """Nodes whose averages are not of the same updates, or of the same step, fold none together."""
    assert verdict(vote(0, 5), [vote(1, 5), vote(2, 5)], 3) is True
    assert verdict(vote(0, 5), [vote(1, 5), vote(2, 5, "other")], 3) is False
    assert verdict(vote(0, 5), [vote(1, 5)], 3) is None
    assert verdict(vote(0, 5), [vote(1, 5), vote(2, 4)], 3) is None
    assert verdict(vote(0, 5), [vote(1, 6, folded=5)], 3) is True
    assert verdict(vote(0, 5), [vote(1, 6, folded=4)], 3) is False


def test_a_node_that_was_renamed_is_not_asked() -> None:
    """The newest word for a rank holds: an older one is of a daemon that is gone."""
    old = AverageVote((1, 2), 3, "", 1)
    assert verdict(vote(0, 5), [vote(1, 5), vote(2, 5), old], 3) is True
    assert verdict(vote(1, 5), [vote(0, 5), vote(2, 5), old], 3) is True


class Table:
    """What nodes have told, in the place of a catalog that may be away."""

    def __init__(self) -> None:
        self.rows: dict[str, AverageVote] = {}
        self.lock = threading.Lock()
        self.away = False
        self.agreements: list[Agreement] = []

    def of(self, node: str) -> OfNode:
        return OfNode(self, node)


class OfNode:
    def __init__(self, table: Table, node: str) -> None:
        self.table, self.node = table, node

    def cast(self, run: str, attempt: int, vote: AverageVote) -> list[AverageVote]:
        if self.table.away:
            raise CatalogUnavailable("the test says so")
        with self.table.lock:
            self.table.rows[self.node] = vote
            return [row for node, row in self.table.rows.items() if node != self.node]

    def notify(self) -> None:
        for agreement in self.table.agreements:
            agreement.look()


def test_who_waits_is_told() -> None:
    """As soon as the last node has voted, also where that was not possible for a while; what is forgotten still holds."""
    table = Table()
    rung = [threading.Event(), threading.Event(), threading.Event()]
    for number in range(3):
        table.agreements.append(Agreement(table.of(f"n{number}"), lambda key, number=number: rung[number].set()))
    a, b, c = table.agreements
    try:
        assert a.counts(KEY, vote(0, 1)) is None
        table.away = True
        assert b.counts(KEY, vote(1, 1)) is None
        wait_until(lambda: b.away)
        table.away = False
        assert c.counts(KEY, vote(2, 1)) is None
        for rank, one in enumerate(table.agreements):
            wait_until(lambda rank=rank, one=one: one.counts(KEY, vote(rank, 1)) is True)
        assert all(event.is_set() for event in rung)
        assert a.counts(KEY, vote(0, 2, "", 1)) is False  # known at once
        a.forget(KEY)
        assert b.counts(KEY, vote(1, 2, folded=1)) in (None, False)
        wait_until(lambda: b.counts(KEY, vote(1, 2, folded=1)) is False)
    finally:
        for one in table.agreements:
            one.close()

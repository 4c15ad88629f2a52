"""Ranks that are connected to each node, by run."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from holdfast_service.control.database.cluster_schema import NodeRanksRow, NodeRow, SpeakerRow
from holdfast_service.wings.cluster.membership import Membership, now

LATE_S = 5.0  # a beat that comes so much later than it should is missed
ARRIVING_S = 30.0  # a rank that was let in is shown as connected for so long, although it is not yet


class NodeRanks(NamedTuple):
    """Connected ranks of a run: their number, of which attempt and world.

    `left_s`: in how many seconds all of them count as gone without another sign of life; None where one certainly lives.
    """

    attempt: int
    world: int
    ranks: int
    left_s: float | None = None


class ConnectedNodes:
    """Connected ranks by node."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database
        self._arriving: dict[str, float] = {}  # by run, until when (monotonic)
        self._lock = threading.Lock()

    def elsewhere(self, session: Session, run: str) -> dict[str, NodeRanks]:
        """The ranks of a run at other member nodes, by node. Those of a node that has missed a heartbeat count as gone when
        its lease ends.
        """
        me, late_s = self._membership.me, self._membership.lease_s - self._membership.beat_s - LATE_S
        query = select(NodeRanksRow, func.extract("epoch", NodeRow.until - now())).join(NodeRow, _live())
        node_ranks = {}
        for row, lease_s in session.execute(
            query.where(NodeRanksRow.run == run, NodeRanksRow.node != me.name, NodeRanksRow.ranks > 0)
        ):
            left = [row.left_s, float(lease_s) if lease_s < late_s else None]
            left_s = min((one for one in left if one is not None), default=None)
            node_ranks[row.node] = NodeRanks(row.attempt, row.world, row.ranks, left_s)
        return node_ranks

    def of(self, run: str, attempt: int) -> tuple[dict[str, int], set[int]]:
        """The number of connected ranks of an attempt per member node, and all ranks that ever were connected."""
        query = select(NodeRanksRow.node, NodeRanksRow.ranks).join(NodeRow, _live())
        with self._database.apart() as session:
            rows = session.execute(query.where(NodeRanksRow.run == run, NodeRanksRow.attempt == attempt))
            spoken = select(SpeakerRow.rank).where(SpeakerRow.run == run, SpeakerRow.attempt == attempt)
            return {node: int(ranks) for node, ranks in rows}, set(session.scalars(spoken))

    def by_node(self) -> dict[str, dict[str, int]]:
        """The number of connected ranks of the visible runs, by node and run."""
        found: dict[str, dict[str, int]] = {}
        with self._database.read() as session:
            wanted = select(NodeRanksRow.node, NodeRanksRow.run, NodeRanksRow.ranks).where(NodeRanksRow.ranks > 0)
            for node, run, ranks in session.execute(wanted.order_by(NodeRanksRow.node, NodeRanksRow.run)):
                found.setdefault(node, {})[run] = int(ranks)
        return found

    def connected(self) -> set[str]:
        """The runs with ranks connected to a member node."""
        with self._database.read() as session:
            return set(session.scalars(select(NodeRanksRow.run).join(NodeRow, _live()).where(NodeRanksRow.ranks > 0)))

    def arrive(self, session: Session, run: str, rank_set: NodeRanks) -> None:
        """Record a new rank of this run at this node. Until the next heartbeat has its state, other nodes ask again."""
        with self._lock:
            self._arriving[run] = time.monotonic() + ARRIVING_S
        self._put(session, run, rank_set._replace(left_s=self._membership.beat_s + LATE_S))

    def report(self, here: Mapping[str, NodeRanks]) -> None:
        """Tell the others whose ranks are connected here now."""
        me = self._membership.me
        with self._lock:
            self._arriving = {run: until for run, until in self._arriving.items() if until > time.monotonic()}
            stays = here.keys() | self._arriving.keys()
        with self._database.apart() as session:
            session.execute(delete(NodeRanksRow).where(NodeRanksRow.node == me.name, NodeRanksRow.run.not_in(stays)))
            for run, rank_set in sorted(here.items()):
                self._put(session, run, rank_set)

    def parted(self, run: str) -> None:
        """Record that the run has no connected rank here any more."""
        with self._lock:
            self._arriving.pop(run, None)
        self._membership.beat_soon()

    def _put(self, session: Session, run: str, rank_set: NodeRanks) -> None:
        me = self._membership.me
        values = {"boot": me.boot, **rank_set._asdict()}
        statement = insert(NodeRanksRow).values({"run": run, "node": me.name} | values)
        session.execute(statement.on_conflict_do_update(index_elements=[NodeRanksRow.run, NodeRanksRow.node], set_=values))


def _live() -> ColumnElement[bool]:
    """Whether the node of a row is a member, and was not started again since."""
    return (NodeRow.name == NodeRanksRow.node) & (NodeRow.boot == NodeRanksRow.boot) & (NodeRow.until > now())

"""A daemon's interface to its cluster: membership, duties, locks, and connected ranks and readers of other nodes."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.orm import Session

from holdfast_formats.errors import CatalogUnavailable
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import DUTY_CHARS_MAX, HoldRow, NodeRanksRow, NodeRow, SecretRow, SpeakerRow
from holdfast_service.wings.cluster.average_votes import AverageVotes
from holdfast_service.wings.cluster.duties import ClusterLocks, Duties
from holdfast_service.wings.cluster.joint_rounds import JointRounds
from holdfast_service.wings.cluster.membership import Membership, later, now, this_daemon
from holdfast_service.wings.cluster.rank_reports import RankReports
from holdfast_service.wings.cluster.rendezvous import Rendezvous

log = logging.getLogger(__name__)

HOLD_S = 60.0  # a hold that another node sees lasts so long beyond the last beat in which it was renewed
REPLICA = "replica "  # what the names of such duties begin with
_SECRET, _SECRET_BEFORE = "exchange", "exchange-before"
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
        live = (NodeRow.name == NodeRanksRow.node) & (NodeRow.boot == NodeRanksRow.boot) & (NodeRow.until > now())
        query = select(NodeRanksRow, func.extract("epoch", NodeRow.until - now())).join(NodeRow, live)
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
        live = (NodeRow.name == NodeRanksRow.node) & (NodeRow.boot == NodeRanksRow.boot) & (NodeRow.until > now())
        query = select(NodeRanksRow.node, NodeRanksRow.ranks).join(NodeRow, live)
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
        live = (NodeRow.name == NodeRanksRow.node) & (NodeRow.boot == NodeRanksRow.boot) & (NodeRow.until > now())
        with self._database.read() as session:
            return set(session.scalars(select(NodeRanksRow.run).join(NodeRow, live).where(NodeRanksRow.ranks > 0)))

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


class SharedHolds:
    """Checkpoints that are being read through a node, so that no other node removes them."""

    def __init__(self, membership: Membership, locks: ClusterLocks) -> None:
        self._membership, self._locks, self._database = membership, locks, membership.database

    def announce(self, run: str, step: int, opened: bool) -> None:
        """Record a reader at this node, after any removal of the run that another node is deciding. `opened`: it reads files
        that it has open, so it blocks removal, not replacement.

        While the catalog is away no node removes anything, so nothing needs to be recorded.
        """
        try:
            with self._locks.session(deciding(run), shared=True, insists=True) as session:
                self._put(session, run, step, opened)
        except CatalogUnavailable as away:
            log.info("other nodes are not told that %s@%s is being read: %s", run, step, away.detail)

    def elsewhere(self, run: str, opened: bool = True) -> dict[int, float]:
        """The steps of a run that are being read through other nodes, with seconds that remain at least; without `opened`,
        not those with readers of open files only.
        """
        left = func.extract("epoch", HoldRow.until - now())
        wanted = [HoldRow.run == run, HoldRow.node != self._membership.me.name, HoldRow.until > now()]
        if not opened:
            wanted.append(HoldRow.opened.is_(False))
        ends: dict[int, float] = {}
        with self._database.apart() as session:
            for step, seconds in session.execute(select(HoldRow.step, left).where(*wanted)):
                ends[step] = max(ends.get(step, 0.0), float(seconds))
        return ends

    def renew(self, here: Mapping[tuple[str, int], bool]) -> None:
        """Renew what is still being read `here`; the rest ends."""
        with self._database.apart() as session:
            mine = HoldRow.node == self._membership.me.name
            known = {(row.run, row.step) for row in session.scalars(select(HoldRow).where(mine))}
            for run, step in known - here.keys():
                session.execute(delete(HoldRow).where(mine, HoldRow.run == run, HoldRow.step == step))
            for (run, step), opened in sorted(here.items()):
                self._put(session, run, step, opened)

    def _put(self, session: Session, run: str, step: int, opened: bool) -> None:
        values = {"opened": opened, "until": later(HOLD_S)}
        statement = insert(HoldRow).values({"run": run, "step": step, "node": self._membership.me.name} | values)
        key = [HoldRow.run, HoldRow.step, HoldRow.node]
        session.execute(statement.on_conflict_do_update(index_elements=key, set_=values))


class Cluster:
    """This daemon's view of its cluster: of one node, as long as no other daemon uses the catalog."""

    def __init__(self, database: Database, node: str, **lease: Any) -> None:
        """Does not contact the database. `lease` are the times of `Membership`."""
        self.database = database
        self.membership = Membership(database, this_daemon(node), **lease)
        self.duties = Duties(self.membership)
        self.locks = ClusterLocks(self.membership)
        self.node_ranks = ConnectedNodes(self.membership)
        self.holds = SharedHolds(self.membership, self.locks)
        self.rendezvous = Rendezvous(self.membership)
        self.rounds = JointRounds(database)
        self.votes = AverageVotes(self.membership)
        self.words = RankReports(self.membership)

    @property
    def node(self) -> str:
        return self.membership.me.name

    def secrets(self) -> tuple[str, ...]:
        """The secrets shared by the nodes of this cluster, newest first; the first node creates one."""
        wanted = select(SecretRow.name, SecretRow.value).where(SecretRow.name.in_((_SECRET, _SECRET_BEFORE)))
        with self.database.apart(hopeful=True) as session:
            found = {name: value for name, value in session.execute(wanted)}
            if _SECRET not in found:
                session.execute(_secret(_SECRET, secrets.token_urlsafe(32)).on_conflict_do_nothing())
                found = {name: value for name, value in session.execute(wanted)}
        return tuple(found[name] for name in (_SECRET, _SECRET_BEFORE) if name in found)

    def rotate_secret(self) -> None:
        """Create a new secret. The previous one stays valid until the next rotation."""
        self.secrets()
        with self.database.apart() as session:
            held = session.scalar(select(SecretRow.value).where(SecretRow.name == _SECRET).with_for_update())
            for name, value in ((_SECRET_BEFORE, str(held)), (_SECRET, secrets.token_urlsafe(32))):
                put = _secret(name, value)
                session.execute(put.on_conflict_do_update(index_elements=[SecretRow.name], set_={"value": value}))
        self.membership.beat_soon()

    def close(self) -> None:
        self.membership.close()


def _secret(name: str, value: str) -> Insert:
    return insert(SecretRow).values(name=name, value=value)


def deciding(run: str) -> str:
    """The name of the lock under which a run's checkpoints are removed, replaced, pinned and labelled."""
    return f"deciding {run}"


def changing(run: str) -> str:
    """The name of the lock under which a run's file is read and replaced."""
    return f"run file {run}"


def repairing(run: str, step: int) -> str:
    """The name of the lock under which a checkpoint is repaired."""
    return f"repairing {run}@{step}"


def replica_duty(name: str) -> str:
    """The name of the duty to copy to a replica: one node does, also where several are configured with it."""
    return f"{REPLICA}{name}"[:DUTY_CHARS_MAX]

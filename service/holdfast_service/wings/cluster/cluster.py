"""A daemon's interface to its cluster: membership, duties, locks, and connected ranks and readers of other nodes."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from sqlalchemy import delete, func, select
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.orm import Session

from holdfast_formats.errors import CatalogUnavailable
from holdfast_service.control.database.cluster_schema import HoldRow, SecretRow
from holdfast_service.control.database.database import Database
from holdfast_service.control.nodes import deciding
from holdfast_service.storage import Records
from holdfast_service.wings.cluster.average_votes import AverageVotes
from holdfast_service.wings.cluster.duties import ClusterLocks, Duties
from holdfast_service.wings.cluster.joint_rounds import JointRounds
from holdfast_service.wings.cluster.membership import Membership, later, now, this_daemon
from holdfast_service.wings.cluster.node_ranks import ConnectedNodes
from holdfast_service.wings.cluster.rank_reports import RankReports
from holdfast_service.wings.cluster.rendezvous import Rendezvous
from holdfast_service.wings.cluster.shared_attempts import SharedAttempts

log = logging.getLogger(__name__)

NAMES_S = 90.0  # network file systems' clients cache names for no longer by default
HOLD_S = 60.0  # a hold that another node sees lasts so long beyond the last beat in which it was renewed
_SECRET, _SECRET_BEFORE = "exchange", "exchange-before"


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
            log.info("cannot tell other nodes that %s@%s is being read: %s", run, step, away.detail)

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
    """This daemon's view of its cluster, as control asks it (`Nodes`): of one node, as long as no other daemon uses the
    catalog.
    """

    alone, names_s = False, NAMES_S

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
        self.has, self.locked, self.settle = self.duties.has, self.locks.locked, self.rendezvous.settle
        self.changed, self.members = self.membership.beat_soon, self.membership.members
        self.census, self.forget, self.close = self.membership.census, self.membership.forget, self.membership.close
        self.parted, self.connected = self.node_ranks.parted, self.node_ranks.connected
        self.by_node = self.node_ranks.by_node

    @property
    def node(self) -> str:
        return self.membership.me.name

    @property
    def boot(self) -> str:
        return self.membership.me.boot

    def attempts(self, records: Records) -> SharedAttempts:
        return SharedAttempts(records, self.membership, self.node_ranks, self.rounds)

    def join(self, wait_s: float | None = None) -> None:
        """As `Membership.join`; does nothing for a member."""
        if not self.membership.joined:
            self.membership.join(wait_s)

    def beaten_s(self) -> float:
        return self.membership.beaten_s

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


def _secret(name: str, value: str) -> Insert:
    return insert(SecretRow).values(name=name, value=value)

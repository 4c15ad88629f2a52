"""Membership of a cluster: the daemons that share a catalog, each with a lease that it renews.

All times are the database's (I17). A daemon whose lease has ended is no member: its duties, locks and holds are
other nodes' from then on, and it joins again, as another boot, before it does anything for the cluster again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Interval, String, and_, cast, delete, func, literal, not_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from holdfast_formats.errors import CatalogUnavailable, CheckpointError, InUse, NoSuchResource, RootBusy
from holdfast_service.control.database.cluster_schema import DutyRow, HoldRow, NodeRanksRow, NodeRow
from holdfast_service.control.database.database import Database
from holdfast_service.control.nodes import CAME_BACK, LEASE_S, LEFT, RETURNED_S, Census, ClusterNode

log = logging.getLogger(__name__)

BEAT_S = 10.0
JOIN_POLL_S = 0.5
STOPPED_S = 3600.0  # a node that was stopped is listed for so long
LOST_S = 7 * 86_400.0  # a lost one is listed for longer, so that an operator can investigate or remove it
_NOTED = "noted"  # in a row's `about`: some node was told that it is lost


class NodeIdentity(NamedTuple):
    """This daemon: its node's name, and what distinguishes it from earlier ones of that name."""

    name: str
    boot: str
    machine: str
    pid: int


def this_daemon(name: str) -> NodeIdentity:
    """This process as a member, with a boot of its own."""
    return NodeIdentity(name, uuid.uuid4().hex, _machine(), os.getpid())


def now() -> ColumnElement[datetime]:
    """The database's time at this statement, not at its transaction's begin."""
    return func.clock_timestamp()


def now_text() -> ColumnElement[str]:
    """The database's time as text, as `moments` writes times."""
    return func.to_char(func.timezone("UTC", now()), 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"', type_=String)


def later(seconds: float) -> ColumnElement[datetime]:
    """The database's time in so many seconds."""
    return now() + cast(literal(f"{seconds} seconds"), Interval)


class Membership:
    """This daemon's membership: `join` it, then it beats until `close`. Thread-safe.

    `about` says what the other nodes show of this one.
    """

    def __init__(
        self,
        database: Database,
        me: NodeIdentity,
        about: Callable[[], Mapping[str, Any]] = dict,
        *,
        lease_s: float = LEASE_S,
        beat_s: float = BEAT_S,
    ) -> None:
        self.database, self.me, self.about = database, me, about
        self.lease_s, self.beat_s = lease_s, beat_s
        self._after_beat: Sequence[Callable[[], None]] = ()
        self.joined = False
        self._came_back = False  # this node was lost before it joined
        self._said: dict[str, Any] = {}  # what this node last said of itself
        self._beaten = time.monotonic()  # when its membership was last renewed
        self._lock = threading.Lock()  # one join at a time
        self._wake = threading.Event()
        self._closed = False
        self._thread: threading.Thread | None = None

    def join(self, wait_s: float | None = None) -> None:
        """Become a member. `RootBusy` if another daemon of this name still is one after `wait_s` seconds, by default a
        little longer than a lease; `CatalogUnavailable`.

        One of this machine is not waited for: it has ended, because this daemon has the lock of their name here.
        """
        limit = time.monotonic() + (self.lease_s + 2 * self.beat_s if wait_s is None else wait_s)
        is_reported = False
        with self._lock:
            while (other := self._joined_or_other()) is not None:
                if time.monotonic() >= limit or self._closed:
                    raise RootBusy(
                        f"another daemon of this cluster has the name {self.me.name!r}: process {other.pid} on "
                        f"{other.about.get('host', 'another machine')}",
                        hint="give every daemon its own name: --node NAME",
                        node=self.me.name,
                    )
                if not is_reported:
                    log.info("another daemon named %s has not signed off: waiting until its lease ends", self.me.name)
                    is_reported = True
                self._wake.wait(JOIN_POLL_S)
            self.joined = True
            self._beaten = time.monotonic()

    @property
    def beaten_s(self) -> float:
        """Seconds since this node's membership was last renewed."""
        return time.monotonic() - self._beaten

    def start(
        self, about: Callable[[], Mapping[str, Any]] | None = None, after_beat: Sequence[Callable[[], None]] = ()
    ) -> None:
        """Renew the lease from now on, and show `about` to the other nodes. Each of `after_beat` is called after every beat,
        in its thread.
        """
        self.about, self._after_beat = about or self.about, after_beat
        self._thread = threading.Thread(target=self._run, name="holdfast-membership", daemon=True)
        self._thread.start()

    def beat_soon(self) -> None:
        """Something that the other nodes are to know has changed."""
        self._wake.set()

    def beat(self) -> bool:
        """Renew the lease; False if it was another's meanwhile, or had ended, and this daemon has joined again."""
        mine = (NodeRow.name == self.me.name, NodeRow.boot == self.me.boot, NodeRow.until > now())
        about = self._about()
        with self.database.apart(hopeful=True) as session:
            renewed = session.scalar(
                update(NodeRow).where(*mine).values(until=later(self.lease_s), about=about).returning(NodeRow.name)
            )
        if renewed is not None:
            self._beaten = time.monotonic()
            return True
        self.joined = False
        self.me = self.me._replace(boot=uuid.uuid4().hex)
        log.warning("this node's membership has ended; joining again")
        self.join()
        return False

    def members(self) -> list[ClusterNode]:
        """All nodes of which something is known, by name."""
        with self.database.read() as session:
            return members(session)

    def census(self) -> Census:
        """How many nodes are in each state, and which are lost: of those that go on for long, no more than the number."""
        steady = (NodeRow.until > now(), NodeRow.since < later(-RETURNED_S))
        with self.database.read() as session:
            others = members(session, not_(and_(*steady)))
            live = session.scalar(select(func.count()).select_from(NodeRow).where(*steady)) or 0
        counts = Counter(member.state for member in others)
        counts["live"] += live
        return Census(counts, tuple(member.name for member in others if member.state == "lost"))

    def forget(self, name: str) -> None:
        """List a node that is gone no more. `NoSuchResource`; `InUse` if it is a member."""
        with self.database.apart() as session:
            gone = delete(NodeRow).where(NodeRow.name == name, NodeRow.until <= now()).returning(NodeRow.name)
            if session.scalar(gone) is not None:
                return
            if session.get(NodeRow, name) is None:
                raise NoSuchResource(f"there is no node {name!r}", hint="list nodes with `holdfast nodes`")
        raise InUse(f"the node {name!r} is live", hint="stop its daemon first: only lost or stopped nodes can be forgotten")

    def newly_lost(self) -> list[ClusterNode]:
        """The nodes that were lost, each told once, whichever node asks."""
        lost = []
        with self.database.apart() as session:
            for member in members(session, NodeRow.until <= now()):
                if member.state != "lost" or member.about.get(_NOTED):
                    continue
                mine = (NodeRow.name == member.name, NodeRow.boot == member.boot, NodeRow.until <= now())
                noted = update(NodeRow).where(*mine).values(about={**member.about, _NOTED: True})
                if session.scalar(noted.returning(NodeRow.name)) is not None:
                    lost.append(member)
        return lost

    def is_live(self, session: Session, node: str, boot: str) -> bool:
        """Whether this boot of a node is a member."""
        wanted = (NodeRow.name == node, NodeRow.boot == boot, NodeRow.until > now())
        return session.scalar(select(NodeRow.name).where(*wanted)) is not None

    def close(self) -> None:
        """Leave: others need not wait for the lease to end."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(self.beat_s)
        if not self.joined:
            return
        try:
            with self.database.apart(hopeful=True) as session:
                for row in (DutyRow, NodeRanksRow):
                    session.execute(delete(row).where(row.node == self.me.name, row.boot == self.me.boot))
                session.execute(delete(HoldRow).where(HoldRow.node == self.me.name))
                mine = (NodeRow.name == self.me.name, NodeRow.boot == self.me.boot)
                session.execute(update(NodeRow).where(*mine).values(until=now(), about={**self._said, LEFT: True}))
        except CheckpointError as error:
            log.info("cannot sign off from the cluster: %s", error.detail)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(self.beat_s)
            self._wake.clear()
            if self._closed:
                return
            try:
                if not self.joined:
                    self.join()
                self.beat()
                for act in self._after_beat:
                    act()
            except CatalogUnavailable as away:
                log.info("cannot renew this node's membership: %s", away.detail)
            except CheckpointError as error:
                log.error("%s", error)
            except Exception:
                log.exception("renewing this node's membership failed")

    def _joined_or_other(self) -> _Other | None:
        """Try to join; the other daemon of this name if there is one whose lease is in force."""
        with self.database.apart(hopeful=True) as session:
            row = session.get(NodeRow, self.me.name)
            dead = row.boot if row is not None and row.machine == self.me.machine else ""
            came_back = row is not None and not row.about.get(LEFT)
            free = (NodeRow.until <= now()) | NodeRow.boot.in_([self.me.boot, dead])
            values = {
                "boot": self.me.boot,
                "machine": self.me.machine,
                "pid": self.me.pid,
                "since": now(),
                "until": later(self.lease_s),
                "about": (report := {**self.about(), CAME_BACK: came_back}),
            }
            statement = insert(NodeRow).values({"name": self.me.name} | values)
            taken = session.scalar(
                statement.on_conflict_do_update(index_elements=[NodeRow.name], set_=values, where=free).returning(
                    NodeRow.name
                )
            )
            if taken is None:
                return _Other(0, {}) if row is None else _Other(row.pid, row.about)
            for table in (DutyRow, NodeRanksRow, HoldRow):  # rows of an earlier boot, whose ranks and readers are gone
                session.execute(delete(table).where(table.node == self.me.name))
            self._came_back, self._said = came_back, report
            _forget_old(session)
        return None

    def _about(self) -> dict[str, Any]:
        self._said = {**self.about(), CAME_BACK: self._came_back}
        return self._said


class _Other(NamedTuple):
    pid: int
    about: Mapping[str, Any]


def members(session: Session, *wanted: ColumnElement[bool]) -> list[ClusterNode]:
    """All nodes, or the `wanted` ones, by name, with their present duties."""
    duties: dict[tuple[str, str], list[str]] = {}
    for duty in session.scalars(select(DutyRow).where(DutyRow.until > now()).order_by(DutyRow.name)):
        duties.setdefault((duty.node, duty.boot), []).append(duty.name)
    left, age = func.extract("epoch", NodeRow.until - now()), func.extract("epoch", now() - NodeRow.since)
    members_listed = []
    for row, lease_s, age_s in session.execute(select(NodeRow, left, age).where(*wanted).order_by(NodeRow.name)):
        its = tuple(duties.get((row.name, row.boot), ()))
        members_listed.append(ClusterNode(row.name, row.boot, float(lease_s), row.since, float(age_s), row.about, its))
    return members_listed


def _forget_old(session: Session) -> None:
    for member in members(session, NodeRow.until < later(-STOPPED_S)):
        if member.lease_s < -(STOPPED_S if member.state == "stopped" else LOST_S):
            session.execute(delete(NodeRow).where(NodeRow.name == member.name, NodeRow.boot == member.boot))


def _machine() -> str:
    """An id of this machine since its boot; the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()

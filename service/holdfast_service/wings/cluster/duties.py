"""Duties: work that one node does for all, leased, so that another one takes over when that node is gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy import delete, exists, func, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from holdfast_formats.errors import CatalogUnavailable, CheckpointError
from holdfast_service.control.database.cluster_schema import DutyRow, NodeRow
from holdfast_service.control.database.database import translated
from holdfast_service.wings.cluster.membership import Membership, later, now

log = logging.getLogger(__name__)

_HELD_S = 600  # a removal on slow storage keeps its lock for so long without a statement
_LOCK_TIMEOUT = "55P03"
_HOLDER = "holdfast boot "  # what connections that have a lock are called, before their daemon's boot
_KEEPER = "holdfast, never ended"  # where what is done under the lock does not ask whether it was lost
_HOLDERS = text(
    """
    WITH wanted AS (SELECT hashtextextended(:name, 0) AS key)
    SELECT held.pid, node.name, session.application_name = :keeper FROM wanted, pg_locks held
    JOIN pg_stat_activity session ON session.pid = held.pid
    LEFT JOIN nodes node ON session.application_name = :holder || node.boot AND node.until > clock_timestamp()
    WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 1 AND session.datname = current_database()
    AND held.classid = ((key >> 32) & 4294967295)::oid AND held.objid = (key & 4294967295)::oid
    AND (session.application_name LIKE :holder || '%' OR session.application_name = :keeper)
    AND held.pid <> pg_backend_pid()
    """
)


class Duties:
    """The duties of this node. Thread-safe. A taken duty is renewed with each heartbeat, until its node is gone; then
    another node that has asked for it takes it with its next heartbeat.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database
        self._lock = threading.Lock()
        self._mine: set[str] = set()
        self._known: set[str] = set()  # duties that this node takes when they are free

    def has(self, name: str) -> bool:
        """Whether this node has this duty; takes it if it is free. False while the catalog is away."""
        with self._lock:
            self._known.add(name)
        try:
            return self._take(name)
        except CheckpointError as error:
            log.info("cannot find which node has duty %s: %s", name, error.detail)
            return False

    def take_first(self, names: Sequence[str]) -> str | None:
        """Take the first of these duties that is free; None while the catalog is away."""
        try:
            with self._database.apart() as session:
                taken = set(session.scalars(select(DutyRow.name).where(DutyRow.until > now())))
            return next((name for name in names if name not in taken and self._take(name)), None)
        except CheckpointError as error:
            log.info("cannot take a duty: %s", error.detail)
            return None

    def holds(self, session: Session, name: str) -> bool:
        """Whether this node has this duty until the end of this transaction."""
        me = self._membership.me
        mine = (DutyRow.name == name, DutyRow.node == me.name, DutyRow.boot == me.boot, DutyRow.until > now())
        return session.scalar(select(DutyRow.name).where(*mine).with_for_update()) is not None

    def renew(self) -> None:
        """Renew all duties of this node, and take those whose node is gone; those that another node has taken are
        dropped.
        """
        me = self._membership.me
        with self._lock:
            names, known = sorted(self._mine), sorted(self._known)
        if not known:
            return
        until = later(self._membership.lease_s)
        live = exists().where(NodeRow.name == me.name, NodeRow.boot == me.boot, NodeRow.until > now())
        mine = (DutyRow.name.in_(names), DutyRow.node == me.name, DutyRow.boot == me.boot, live)
        with self._database.apart() as session:
            left = set(session.scalars(update(DutyRow).where(*mine).values(until=until).returning(DutyRow.name)))
            over = update(DutyRow).where(DutyRow.name.in_(known), DutyRow.until <= now(), live)
            left |= set(session.scalars(over.values(node=me.name, boot=me.boot, until=until).returning(DutyRow.name)))
        with self._lock:
            self._mine = left | (self._mine - set(names))

    def give_up(self, name: str) -> None:
        me = self._membership.me
        with self._lock:
            self._mine.discard(name)
            self._known.discard(name)
        with self._database.apart() as session:
            session.execute(delete(DutyRow).where(DutyRow.name == name, DutyRow.node == me.name, DutyRow.boot == me.boot))

    def _take(self, name: str) -> bool:
        me = self._membership.me
        if not self._membership.joined:
            return False
        values = {"node": me.name, "boot": me.boot, "until": later(self._membership.lease_s)}
        free = (DutyRow.until <= now()) | ((DutyRow.node == me.name) & (DutyRow.boot == me.boot))
        with self._database.apart() as session:
            if not self._membership.is_live(session, me.name, me.boot):
                return False
            statement = insert(DutyRow).values({"name": name} | values)
            got = session.scalar(
                statement.on_conflict_do_update(index_elements=[DutyRow.name], set_=values, where=free).returning(
                    DutyRow.name
                )
            )
        with self._lock:
            if got is None:
                self._mine.discard(name)
            else:
                self._mine.add(name)
        return got is not None


class ClusterLocks:
    """Named locks that at most one node has. The database frees them when the node's connection ends. A node whose lease has
    ended may be suspended: the next node that wants its lock ends its connection.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database

    @contextmanager
    def locked(
        self, name: str, shared: bool = False, *, insists: bool = False, asks: bool = True
    ) -> Iterator[Callable[[], None]]:
        """Hold the lock `name` for the length of a block; call what it yields before acts that need the lock, and after acts
        that can be undone. With `asks=False` the caller never does, and no other node takes its lock.

        `CatalogUnavailable` if another node has it for too long, if it was lost, or if the database does not answer. It may
        be `shared` with others. With `insists` the block is entered in any case: a node that has the lock for too long loses
        it.
        """
        done = False
        try:
            with self.session(name, shared, insists=insists, asks=asks) as session:
                yield lambda: self._check(session)
                done = True
        except CatalogUnavailable as lost:
            if not done:
                raise
            log.info("lock %r was lost before the work under it had finished: %s", name, lost.detail)

    def _check(self, session: Session) -> None:
        with translated():
            session.execute(select(1))

    @contextmanager
    def session(self, name: str, shared: bool = False, *, insists: bool = False, asks: bool = True) -> Iterator[Session]:
        """As `locked`, for statements in the lock's own transaction."""
        with self._database.apart() as session:
            is_mine = func.set_config("application_name", f"{_HOLDER}{self._membership.me.boot}" if asks else _KEEPER, True)
            session.execute(select(is_mine, func.set_config("idle_in_transaction_session_timeout", f"{_HELD_S}s", True)))
            lock = func.pg_advisory_xact_lock_shared if shared else func.pg_advisory_xact_lock
            taken = select(lock(func.hashtextextended(name, 0)))
            try:
                with session.begin_nested():
                    session.execute(taken)
            except OperationalError as waited:
                if getattr(waited.orig, "sqlstate", None) != _LOCK_TIMEOUT:
                    raise
                self._end_holders(session, name, insists)
                session.execute(taken)
            yield session

    def _end_holders(self, session: Session, name: str, insists: bool) -> None:
        """End the connections that hold the lock; `CatalogUnavailable` where one is a member's, unless `insists`, or must
        not be ended.
        """
        for pid, node, is_kept in session.execute(_HOLDERS, {"name": name, "holder": _HOLDER, "keeper": _KEEPER}).all():
            if is_kept or (node is not None and not insists):
                raise CatalogUnavailable(
                    f"{f'the daemon of node {node}' if node else 'another daemon'} has held lock {name!r} for too long",
                    hint="try again; if it persists, that daemon is stopped or its storage is slow: see `holdfast nodes`",
                )
            log.warning("ending the session of %s, which holds lock %r", f"node {node}" if node else "a lost node", name)
            session.execute(select(func.pg_terminate_backend(pid)))

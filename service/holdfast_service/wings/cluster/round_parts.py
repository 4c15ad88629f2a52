"""Adds the parts of nodes to a round: in the usual case in one statement, otherwise under a lock of the step.

The end of a round is reported once to each node that does not know it, when it brings its part of the same step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import zstandard
from sqlalchemy import BigInteger, ColumnElement, cast, exists, func, literal, select
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.orm import Session, aliased
from sqlalchemy.sql.dml import ReturningInsert

from holdfast_formats.errors import RoundAborted, StaleAttempt, StateMismatch, from_problem
from holdfast_service.control.database.cluster_schema import DeclarationRow, JointRoundRow, PartRow
from holdfast_service.control.database.columns import CatalogTable
from holdfast_service.control.database.schema import RunRow
from holdfast_service.wings.cluster.membership import Membership, now, now_text

GOING = ("open", "sealed", "committing")


class StepKey(NamedTuple):
    """The step that a round saves."""

    run: str
    step: int
    attempt: int

    def of(self, row: type[JointRoundRow]) -> tuple[ColumnElement[bool], ...]:
        return row.run == self.run, row.step == self.step, row.attempt == self.attempt

    def new_id(self) -> ColumnElement[int]:
        """The number of a new round: the database's time in microseconds, above all of this step. A catalog restored from a
        backup would repeat numbers of a sequence, and staging paths differ in nothing else (I11).
        """
        last = select(func.max(JointRoundRow.id)).where(*self.of(JointRoundRow)).scalar_subquery()
        micros = cast(func.extract("epoch", now()) * 1_000_000, BigInteger)
        return func.greatest(micros, func.coalesce(last, 0) + 1)

    def lock(self, session: Session) -> None:
        """Take the lock under which rounds of this step are created and ended, until the transaction ends."""
        number = int.from_bytes(
            hashlib.sha256(f"{self.run}@{self.step}~{self.attempt}".encode()).digest()[:8], "big", signed=True
        )
        session.execute(select(func.pg_advisory_xact_lock(number)))


class RoundParts:
    """Adds this node's parts, and remembers which ended rounds were reported to it. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database

    def bring(self, key: StepKey, world: int, ranks: Collection[int], declaration: bytes, data: bytes) -> int:
        """As `Rendezvous.arrive`."""
        digest, me = hashlib.sha256(declaration).hexdigest(), self._membership.me
        packed, mine = zstandard.compress(data), sorted(ranks)
        brought = self._bring_as_usual(key, world, {"ranks": mine, "declaration": digest, "said": packed})
        if brought is not None:
            return brought
        with self._database.apart() as session:
            key.lock(session)
            _refuse_stale(session, key)
            row = self._going(session, key, world, packed)
            part = session.get(PartRow, (row.id, me.name))
            if row.state == "committed":
                return row.id
            if row.state != "open":
                if part is None or (part.ranks, part.declaration, part.said) != (mine, digest, packed):
                    raise RoundAborted(f"step {key.step} is being written already, with another part of this node")
                part.boot = me.boot
                return row.id
            if row.world != world:
                raise StateMismatch(f"ranks of this node have a world size of {world}, but the save has {row.world}")
            if session.get(DeclarationRow, digest) is None:
                body = {"digest": digest, "body": zstandard.compress(declaration), "since": now()}
                session.execute(insert(DeclarationRow).values(body).on_conflict_do_nothing())
            values = {"boot": me.boot, "ranks": mine, "declaration": digest, "said": packed}
            statement = insert(PartRow).values({"round_id": row.id, "node": me.name} | values)
            session.execute(statement.on_conflict_do_update(index_elements=[PartRow.round_id, PartRow.node], set_=values))
            return row.id

    def _bring_as_usual(self, key: StepKey, world: int, part: Mapping[str, Any]) -> int | None:
        """The usual case of `bring`: one statement where the round is open, three where the step is new. None where it needs
        the lock.
        """
        bring, make = self._put_part(key, world, part), self._make(key, world, part["declaration"])
        with self._database.plain() as connection:
            round_id = connection.scalar(bring)
            if round_id is None:
                connection.execute(make)
                round_id = connection.scalar(bring)
        return None if round_id is None else int(round_id)

    def _put_part(self, key: StepKey, world: int, part: Mapping[str, Any]) -> ReturningInsert[Any]:
        """Insert the part into the open round. The round is locked meanwhile, so it is not sealed in between."""
        values = {"boot": self._membership.me.boot, **part}
        columns = {"node": self._membership.me.name, **values}
        is_open = (*key.of(JointRoundRow), JointRoundRow.state == "open", JointRoundRow.world == world)
        usual = self._is_usual(key, part["declaration"])
        query = select(JointRoundRow.id, *_literals(PartRow, columns)).where(*is_open, usual).with_for_update(read=True)
        statement = insert(PartRow).from_select(["round_id", *columns], query)
        same = [PartRow.round_id, PartRow.node]
        return statement.on_conflict_do_update(index_elements=same, set_=values).returning(PartRow.round_id)

    def _make(self, key: StepKey, world: int, declaration: str) -> Insert:
        """Insert an open round, where this step has none yet."""
        values = {**key._asdict(), "world": world, "state": "open"}
        first = (self._is_usual(key, declaration), ~exists().where(*key.of(JointRoundRow)))
        new = select(key.new_id(), *_literals(JointRoundRow, values), now_text(), now()).where(*first)
        return insert(JointRoundRow).from_select(["id", *values, "created", "changed"], new).on_conflict_do_nothing()

    def _is_usual(self, key: StepKey, declaration: str) -> ColumnElement[bool]:
        """Whether the declaration is stored, no newer attempt has begun, and no aborted round is unreported to this node."""
        known = exists().where(DeclarationRow.digest == declaration)
        newer = exists().where(RunRow.name == key.run, RunRow.attempt > key.attempt)
        ended, mine = aliased(JointRoundRow), aliased(PartRow)
        heard = exists().where(mine.round_id == ended.id, mine.node == self._membership.me.name, mine.said == b"")
        return known & ~newer & ~exists().where(*key.of(ended), ended.state == "aborted", ~heard)

    def _going(self, session: Session, key: StepKey, world: int, packed: bytes) -> JointRoundRow:
        """The open round, locked in share mode until the transaction ends, created if necessary. Or the round that has
        already committed what this node brings.
        """
        of_key = select(JointRoundRow).where(*key.of(JointRoundRow)).order_by(JointRoundRow.id.desc())
        newest = of_key.limit(1).with_for_update(read=True)
        heard = select(PartRow.round_id).where(PartRow.node == self._membership.me.name, PartRow.said == b"")
        ended = session.scalar(of_key.where(JointRoundRow.state == "aborted", JointRoundRow.id.not_in(heard)).limit(1))
        if ended is not None:
            self.receive(session, ended.id)
            problem = ended.problem or {}
            session.commit()
            raise from_problem(problem)
        last = session.scalar(newest)
        if last is not None and (last.state in GOING or self._was_in(session, last, packed)):
            return last
        values = {
            "id": key.new_id(),
            **key._asdict(),
            "world": world,
            "state": "open",
            "created": now_text(),
            "changed": now(),
        }
        session.execute(insert(JointRoundRow).values(values).on_conflict_do_nothing())
        row = session.scalar(newest)
        if row is None or row.state not in GOING:
            raise RoundAborted(f"step {key.step} was given up on another node at the same time")
        return row

    def _was_in(self, session: Session, last: JointRoundRow, packed: bytes) -> bool:
        part = session.get(PartRow, (last.id, self._membership.me.name))
        if last.state != "committed" or part is None or part.said != packed:
            return False
        return part.boot != self._membership.me.boot  # else this daemon has seen the end of that one: this is another save

    def receive(self, session: Session, round_id: int) -> None:
        """Note that this node knows the end of the round, and drop its part."""
        me = self._membership.me
        empty = {"boot": me.boot, "ranks": [], "said": b""}
        statement = insert(PartRow).values({"round_id": round_id, "node": me.name} | empty)
        session.execute(statement.on_conflict_do_update(index_elements=[PartRow.round_id, PartRow.node], set_=empty))

    def has_heard(self, session: Session, round_id: int) -> bool:
        part = session.get(PartRow, (round_id, self._membership.me.name))
        return part is not None and part.said == b""


def _literals(row: type[CatalogTable], values: Mapping[str, Any]) -> list[ColumnElement[Any]]:
    """The values as literals, with their columns' types."""
    return [literal(value, row.__table__.c[name].type) for name, value in values.items()]


def _refuse_stale(session: Session, key: StepKey) -> None:
    newest = session.scalar(select(RunRow.attempt).where(RunRow.name == key.run))
    if newest is not None and newest > key.attempt:
        raise StaleAttempt(
            f"attempt {key.attempt} of {key.run} is shut out: attempt {newest} has started",
            hint="a newer launch of this run is active; stop this one",
            newest=newest,
        )

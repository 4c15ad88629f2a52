"""Checks that several nodes share: their portions, claims, results and ends.

A claim ends with its time, with its node's membership, or when it is given back; then any node may claim the portion. A node
that has lost a claim can record neither proof nor damage of the portion: each statement compares the claim's number.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, delete, exists, false, func, insert, or_, select, tuple_, update
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session, aliased

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import Damaged
from holdfast_formats.staging.shared_check import (
    CheckedCheckpoint,
    CheckEnding,
    CheckProgress,
    Portion,
    PortionFound,
    PortionPlan,
    Span,
)
from holdfast_service.control.database.cluster_schema import DutyRow, NodeRow, PortionRow, SharedCheckRow
from holdfast_service.control.findings.checks import Findings
from holdfast_service.control.nodes import REPLICA
from holdfast_service.wings.cluster.membership import Membership, later, now
from holdfast_service.wings.cluster.notify_listener import CHANNEL, CHECKS

log = logging.getLogger(__name__)

CLAIM_S = 60.0  # of a portion of which nothing more is read: a mount that hangs
END_S = 600.0  # of the end: other layouts are tried
GRACE_S = 10.0  # a portion is left for so long to the node that it is meant for


class SharedChecks:
    """The shared checks of one catalog, as one node sees them. Thread-safe; `CatalogUnavailable` from every call."""

    def __init__(self, membership: Membership, findings: Findings) -> None:
        self._membership, self._database, self._findings = membership, membership.database, findings

    def readers(self) -> list[str]:
        """The names of all member nodes, sorted."""
        with self._database.plain() as connection:
            return list(connection.scalars(select(NodeRow.name).where(NodeRow.until > now()).order_by(NodeRow.name)))

    def begin(self, of: CheckedCheckpoint, plans: Sequence[PortionPlan]) -> None:
        """Have a checkpoint checked by all nodes; does nothing if that is in progress. A replaced checkpoint's check of this
        step ends.
        """
        with self._database.apart() as session:
            known = session.get(SharedCheckRow, (of.run, of.step), with_for_update=True)
            if known is not None and known.sha256 == of.sha256:
                return
            if known is not None:
                _remove(session, of.run, of.step)
            values = {**of._asdict(), "node": self._membership.me.name, "begun": now(), "claim": 0}
            statement = postgresql.insert(SharedCheckRow).values(values).on_conflict_do_nothing()
            if session.scalar(statement.returning(SharedCheckRow.run)) is None:
                return  # another node has begun it in this moment
            key = {"run": of.run, "step": of.step, "claim": 0, "done": 0}
            rows = [
                {**key, "number": number, "spans": plan.spans, "size": plan.bytes, "meant": plan.reader}
                for number, plan in enumerate(plans)
            ]
            session.execute(insert(PortionRow), rows)
            session.execute(select(func.pg_notify(CHANNEL, CHECKS)))

    def any(self) -> bool:
        """Whether there is any shared check."""
        with self._database.plain() as connection:
            return connection.scalar(select(SharedCheckRow.step).limit(1)) is not None

    def going(self) -> set[tuple[str, int]]:
        """The shared checks, by run and step."""
        with self._database.plain() as connection:
            return {(run, step) for run, step in connection.execute(select(SharedCheckRow.run, SharedCheckRow.step))}

    def claim(self, but: Collection[tuple[str, int, int]] = ()) -> Portion | None:
        """Claim a portion for this node, if there is one; none of `but` (run, step, number).

        Portions meant for this node come first. Those meant for live other nodes are left to them for a while.
        """
        me = self._membership.me
        part, check = aliased(PortionRow), aliased(SharedCheckRow)
        free = or_(part.node.is_(None), part.until <= now(), ~_is_there(part.node, part.boot))
        meant = exists().where(NodeRow.name == part.meant, NodeRow.until > now())
        mine = func.coalesce(part.meant == me.name, false())
        may = or_(part.meant.is_(None), mine, ~meant, check.begun < later(-GRACE_S))
        place = tuple_(part.run, part.step, part.number)
        wanted = [part.found.is_(None), free, may, self._is_member(), *([place.not_in(list(but))] if but else [])]
        first = select(part.run, part.step, part.number).join(check, (check.run == part.run) & (check.step == part.step))
        first = first.where(*wanted).order_by(mine.desc(), check.begun, part.run, part.step, part.number).limit(1)
        one = first.with_for_update(of=part, skip_locked=True).cte("one")
        taken = {"node": me.name, "boot": me.boot, "until": later(CLAIM_S), "claim": PortionRow.claim + 1, "done": 0}
        of = (SharedCheckRow.run == PortionRow.run, SharedCheckRow.step == PortionRow.step)
        at = (PortionRow.run == one.c.run, PortionRow.step == one.c.step, PortionRow.number == one.c.number)
        columns = (PortionRow.number, PortionRow.claim, PortionRow.spans)
        claimed = update(PortionRow).where(*at, *of).values(taken).returning(*columns, *_OF, *_AGE)
        with self._database.plain() as connection:
            row = connection.execute(claimed).first()
        if row is None:
            return None
        number, claim, spans, *checked, node, age_s = row
        own = node == me.name
        return Portion(CheckedCheckpoint(*checked), number, claim, tuple(map(_span, spans)), own, float(age_s))

    def renew(self, portion: Portion, done: int) -> bool:
        """Record so many bytes as read, and renew the claim. False if it has ended."""
        values = {"until": later(CLAIM_S), "done": done}
        with self._database.plain() as connection:
            mine = _claimed(portion)
            return connection.scalar(update(PortionRow).where(*mine).values(values).returning(PortionRow.step)) is not None

    def give_back(self, portion: Portion) -> None:
        """Give the claim back, for any other node."""
        values = {"node": None, "boot": None, "until": None, "meant": None, "done": 0}
        with self._database.plain() as connection:
            connection.execute(update(PortionRow).where(*_claimed(portion)).values(values))

    def hand_over(self, portion: Portion) -> bool:
        """Give the portion to another node that has replicas to repair damage from; False if there is none."""
        duty, me = DutyRow, self._membership.me
        others = select(duty.node).where(duty.name.startswith(REPLICA), duty.until > now(), duty.node != me.name)
        free = {"node": None, "boot": None, "until": None, "done": 0}
        with self._database.plain() as connection:
            other = connection.scalar(others.order_by(duty.name).limit(1))
            if other is None:
                return False
            connection.execute(update(PortionRow).where(*_claimed(portion)).values({**free, "meant": other}))
        return True

    def deliver(self, portion: Portion, statistics: bytes, repaired: Sequence[str]) -> None:
        """Record the portion as proven. Does nothing where the claim has ended."""
        values = {"found": statistics, "repaired": list(repaired), "done": PortionRow.size}
        with self._database.plain() as connection:
            connection.execute(update(PortionRow).where(*_claimed(portion)).values(values))

    def claim_end(self) -> CheckEnding | None:
        """Claim the end of a check whose portions are all proven; None without one that is unclaimed."""
        me, check, part = self._membership.me, aliased(SharedCheckRow), PortionRow
        left = exists().where(part.run == check.run, part.step == check.step, part.found.is_(None))
        free = or_(check.ender.is_(None), check.until <= now(), ~_is_there(check.ender, check.boot))
        first = select(check.run, check.step).where(~left, free, self._is_member()).order_by(check.begun).limit(1)
        one = first.with_for_update(of=check, skip_locked=True).cte("one")
        taken = {"ender": me.name, "boot": me.boot, "until": later(END_S), "claim": SharedCheckRow.claim + 1}
        claimed = update(SharedCheckRow).where(SharedCheckRow.run == one.c.run, SharedCheckRow.step == one.c.step)
        with self._database.plain() as connection:
            row = connection.execute(claimed.values(taken).returning(SharedCheckRow.claim, *_OF, *_AGE)).first()
            if row is None:
                return None
            claim, *checked, node, age_s = row
            of = CheckedCheckpoint(*checked)
            parts = select(part.node, part.found, part.repaired).where(part.run == of.run, part.step == of.step)
            brought = connection.execute(parts.order_by(part.number))
            portions = [PortionFound(node or "", portions or b"", repaired or ()) for node, portions, repaired in brought]
        return CheckEnding(of, claim, portions, node == me.name, float(age_s))

    def leave_end(self, ending: CheckEnding) -> None:
        """Give that claim back."""
        with self._database.plain() as connection:
            left = update(SharedCheckRow).where(*_ends(ending)).values(ender=None, boot=None, until=None)
            connection.execute(left)

    def sound(self, ending: CheckEnding, check: Mapping[str, Any], same_as: int | None, made: Manifest) -> None:
        """Record the whole checkpoint as sound and verified. Does nothing where the claim has ended."""
        of = ending.of
        self._findings.sound(of.run, of.step, check, same_as, made, fence=lambda session: _end(session, ending))
        with self._database.apart() as session:  # of a checkpoint that is no longer listed
            _end(session, ending)

    def damaged(self, of: Portion | CheckEnding, error: Damaged) -> None:
        """Record a portion that is damaged beyond repair: the checkpoint is damaged, and the check ends for all nodes. Does
        nothing where the claim has ended.
        """
        error.members["node"] = self._membership.me.name
        run, step = of.of.run, of.of.step
        self._findings.damaged(run, step, error, checked=True, fence=lambda session: _end(session, of))

    def _is_member(self) -> ColumnElement[bool]:
        me = self._membership.me
        return _is_there(me.name, me.boot) if self._membership.joined else false()

    def drop(self, of: CheckedCheckpoint) -> None:
        """End the check of a checkpoint that is gone or replaced."""
        at = (SharedCheckRow.run == of.run, SharedCheckRow.step == of.step, SharedCheckRow.sha256 == of.sha256)
        with self._database.apart() as session:
            if session.scalar(select(SharedCheckRow.step).where(*at).with_for_update()) is not None:
                _remove(session, of.run, of.step)

    def progress(self, run: str, step: int, sha256: str | None = None) -> CheckProgress | None:
        """The progress of a check; None without one (of the checkpoint with this manifest)."""
        check, part = SharedCheckRow, PortionRow
        at = [check.run == run, check.step == step, *([check.sha256 == sha256] if sha256 is not None else [])]
        joined = select(func.sum(part.done), func.sum(part.size)).select_from(check)
        joined = joined.join(part, (part.run == check.run) & (part.step == check.step)).where(*at)
        with self._database.plain() as connection:
            done, total = connection.execute(joined).one()
        return None if total is None else CheckProgress(int(done), int(total))


_OF = tuple(getattr(SharedCheckRow, name) for name in CheckedCheckpoint._fields)
_AGE = (SharedCheckRow.node, func.extract("epoch", now() - SharedCheckRow.begun))


def _span(listed: Sequence[int]) -> Span:
    begin, end = listed
    return begin, end


def _is_there(node: Any, boot: Any) -> ColumnElement[bool]:
    """Whether this boot of a node is a member."""
    return exists().where(NodeRow.name == node, NodeRow.boot == boot, NodeRow.until > now())


def _claimed(portion: Portion) -> tuple[ColumnElement[bool], ...]:
    """The portion, if this claim is still in force, the checkpoint the same, and the portion not proven."""
    of = portion.of
    same = exists().where(
        SharedCheckRow.run == PortionRow.run, SharedCheckRow.step == PortionRow.step, SharedCheckRow.sha256 == of.sha256
    )
    at = (PortionRow.run == of.run, PortionRow.step == of.step, PortionRow.number == portion.number)
    return *at, PortionRow.claim == portion.claim, PortionRow.node.is_not(None), PortionRow.found.is_(None), same


def _ends(ending: CheckEnding) -> tuple[ColumnElement[bool], ...]:
    of, check = ending.of, SharedCheckRow
    at = (check.run == of.run, check.step == of.step, check.sha256 == of.sha256)
    return *at, check.claim == ending.claim, check.ender.is_not(None)


def _end(session: Session, of: Portion | CheckEnding) -> bool:
    """End the check, if this claim is still in force."""
    at = (SharedCheckRow.run == of.of.run, SharedCheckRow.step == of.of.step, SharedCheckRow.sha256 == of.of.sha256)
    if session.scalar(select(SharedCheckRow.step).where(*at).with_for_update()) is None:
        return False
    if isinstance(of, Portion):
        claim = session.scalar(select(PortionRow.number).where(*_claimed(of)).with_for_update())
    else:
        claim = session.scalar(select(SharedCheckRow.step).where(*_ends(of)))
    if claim is None:
        return False
    _remove(session, of.of.run, of.of.step)
    return True


def _remove(session: Session, run: str, step: int) -> None:
    session.execute(delete(PortionRow).where(PortionRow.run == run, PortionRow.step == step))
    session.execute(delete(SharedCheckRow).where(SharedCheckRow.run == run, SharedCheckRow.step == step))

"""Hands a share that its node cannot write to another node: once in a round.

The node records its failure after its last write, and its receipt is refused from then on. At most one node takes the share
over. So a byte has one writer at a time (I11), and a second failing node ends the round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import zstandard
from sqlalchemy import ColumnElement, exists, func, select, update
from sqlalchemy.orm import aliased

from holdfast_formats.staging.joint import ShareHandover
from holdfast_service.control.database.cluster_schema import JointRoundRow, NodeRow, PartRow
from holdfast_service.wings.cluster.membership import Membership, later, now
from holdfast_service.wings.cluster.notify_listener import CHANNEL

HELP_S = 30.0  # the helper renews its claim within this time


def columns() -> tuple[ColumnElement[Any], ...]:
    row = JointRoundRow
    overdue = func.coalesce(row.helped_until < now(), False)
    return row.unable.expression, row.unable_why.expression, row.helper.expression, overdue


def handover(unable: str | None, why: Mapping[str, Any] | None, helper: str | None, overdue: bool) -> ShareHandover | None:
    """The hand-over of a round, from its `columns`."""
    return None if unable is None else ShareHandover(unable, why or {}, helper, bool(overdue))


class Handovers:
    """Every call is one transaction; `CatalogUnavailable` if the database does not answer. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database

    def ask(self, round_id: int, problem: Mapping[str, Any]) -> bool:
        """As `Rendezvous.hand_over`."""
        me, row = self._membership.me.name, JointRoundRow
        live = (NodeRow.name == PartRow.node) & (NodeRow.boot == PartRow.boot) & (NodeRow.until > now())
        others = exists().where(PartRow.round_id == round_id, PartRow.node != me, PartRow.said != b"", live)
        mine = _undelivered(round_id, me)
        free = (row.id == round_id, row.state == "sealed", row.unable.is_(None), others, mine)
        values = {"unable": me, "unable_why": dict(problem), "helped_until": later(HELP_S)}
        with self._database.apart() as session:
            asked = session.scalar(update(row).where(*free).values(values).returning(row.id)) is not None
            session.execute(select(func.pg_notify(CHANNEL, "")))
            return asked

    def take(self, round_id: int) -> bool:
        """As `Rendezvous.help`."""
        me, row = self._membership.me.name, JointRoundRow
        delivered = exists().where(PartRow.round_id == round_id, PartRow.node == me, PartRow.receipt.is_not(None))
        mine = (row.unable != me, row.helper.is_(None) | (row.helper == me), delivered, _undelivered(round_id, row.unable))
        taken = update(row).where(row.id == round_id, row.state == "sealed", *mine)
        with self._database.plain() as connection:
            return connection.scalar(taken.values(helper=me, helped_until=later(HELP_S)).returning(row.id)) is not None

    def deliver(self, round_id: int, node: str, receipt: bytes) -> None:
        """Store the receipt of a share that this node has written for another one."""
        row, me = JointRoundRow, self._membership.me.name
        mine = exists().where(row.id == round_id, row.state == "sealed", row.unable == node, row.helper == me)
        share = (PartRow.round_id == round_id, PartRow.node == node, PartRow.receipt.is_(None))
        with self._database.plain() as connection:
            connection.execute(update(PartRow).where(*share, mine).values(receipt=zstandard.compress(receipt)))


def _undelivered(round_id: int, node: Any) -> ColumnElement[bool]:
    part = aliased(PartRow)
    return exists().where(part.round_id == round_id, part.node == node, part.receipt.is_(None))

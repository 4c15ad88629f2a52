"""All rounds of the catalog, seen from outside: which are active, where they stage, and which end because no node is
left.
"""

from __future__ import annotations

from sqlalchemy import ColumnElement, delete, exists, func, select, update

from holdfast_formats.errors import RoundAborted
from holdfast_formats.naming import Place
from holdfast_service.control.catalog.listing import GOING_ON
from holdfast_service.control.database.cluster_schema import (
    AverageVoteRow,
    DeclarationRow,
    JointRoundRow,
    NodeRow,
    PartRow,
    RanksWordRow,
    VoteRow,
)
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import RoundRow, RunRow
from holdfast_service.wings.cluster.membership import now
from holdfast_service.wings.cluster.round_parts import GOING

ABANDONED_S = 120.0  # daemons that are started again come back with their parts
_KEPT_S = 3600.0


class JointRounds:
    """All rounds of a catalog. Every call is one transaction; `CatalogUnavailable` if the database does not answer."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def is_writing(self, run: str) -> bool:
        """Whether a round of this run is sealed, neither committed nor aborted, and has a live node."""
        going = (JointRoundRow.run == run, JointRoundRow.state.in_(GOING[1:]), _attended())
        with self._database.plain() as connection:
            return connection.scalar(select(JointRoundRow.id).where(*going).limit(1)) is not None

    def places(self) -> list[Place]:
        """The staging places of rounds that have not ended, also of those in which one live node saves alone: an upload to a
        bucket does not show that it goes on.
        """
        row, lone = JointRoundRow, RoundRow
        joint = select(row.run, row.step, row.attempt, row.id).where(row.state.in_(GOING))
        live = exists().where(NodeRow.name == lone.node, NodeRow.until > now())
        alone = select(lone.run, lone.step, lone.attempt).where(lone.state.in_(GOING_ON), live)
        with self._database.plain() as connection:
            return [Place(*found) for wanted in (joint, alone) for found in connection.execute(wanted)]

    def end_abandoned(self) -> list[tuple[str, int]]:
        """End the rounds without a live node, and delete their parts; returns their runs and steps."""
        old = now() - func.make_interval(0, 0, 0, 0, 0, 0, ABANDONED_S)
        left = (JointRoundRow.state.in_(GOING), JointRoundRow.changed < old, ~_attended())
        problem = RoundAborted("all nodes of the save were lost before it was committed").problem()
        values = {"state": "aborted", "problem": problem, "changed": now()}
        with self._database.apart() as session:
            ended = update(JointRoundRow).where(*left).values(values).returning(JointRoundRow.run, JointRoundRow.step)
            return [(run, step) for run, step in session.execute(ended)]

    def forget(self) -> None:
        """Delete rows of rounds that ended long ago, and of restores, averages and ranks of older attempts."""
        old = now() - func.make_interval(0, 0, 0, 0, 0, 0, _KEPT_S)
        with self._database.apart() as session:
            ended = select(JointRoundRow.id).where(JointRoundRow.state.not_in(GOING), JointRoundRow.changed < old)
            session.execute(delete(PartRow).where(PartRow.round_id.in_(ended)))
            session.execute(delete(JointRoundRow).where(JointRoundRow.state.not_in(GOING), JointRoundRow.changed < old))
            used = select(PartRow.declaration).where(PartRow.declaration.is_not(None))
            session.execute(delete(DeclarationRow).where(DeclarationRow.since < old, DeclarationRow.digest.not_in(used)))
            for row in (VoteRow, AverageVoteRow, RanksWordRow):
                newest = select(RunRow.attempt).where(RunRow.name == row.run).scalar_subquery()
                session.execute(delete(row).where(row.attempt < func.coalesce(newest, row.attempt + 1)))


def _attended() -> ColumnElement[bool]:
    """Whether a node with a part in the round is still a member, with the same boot."""
    attended = (NodeRow.name == PartRow.node) & (NodeRow.boot == PartRow.boot) & (NodeRow.until > now())
    return exists().where(PartRow.round_id == JointRoundRow.id, attended)

"""Votes of nodes on the averages of their ranks: which update is next, and whether all of their ranks bring it.

Each node has one row per attempt, which is never older than its actions. A node that has voted for an update keeps the row
until it has handled the update, so all nodes decide alike from any reads (`wings/cluster/average_agreement`).
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from holdfast_formats.staging.joint import AverageVote
from holdfast_service.control.database.cluster_schema import AverageVoteRow
from holdfast_service.wings.cluster.membership import Membership, now
from holdfast_service.wings.cluster.notify_listener import AVERAGES, CHANNEL


class AverageVotes:
    """Every call is a few statements; `CatalogUnavailable` if the database does not answer. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database

    def cast(self, run: str, attempt: int, vote: AverageVote) -> list[AverageVote]:
        """Store this node's vote, perhaps again; returns the other nodes' votes, the newest first."""
        me, row = self._membership.me.name, AverageVoteRow
        values = {**vote._asdict(), "ranks": list(vote.ranks), "changed": now()}
        statement = insert(row).values({"run": run, "attempt": attempt, "node": me} | values)
        put = statement.on_conflict_do_update(index_elements=[row.run, row.attempt, row.node], set_=values)
        wanted = select(row.ranks, row.number, row.history, row.folded).order_by(row.changed.desc())
        wanted = wanted.where(row.run == run, row.attempt == attempt, row.node != me)
        with self._database.plain() as connection:
            connection.execute(put)
            rows = connection.execute(wanted).all()
        return [AverageVote(tuple(ranks), number, history, folded) for ranks, number, history, folded in rows]

    def notify(self) -> None:
        """Notify all nodes."""
        with self._database.plain() as connection:
            connection.execute(select(func.pg_notify(CHANNEL, AVERAGES)))

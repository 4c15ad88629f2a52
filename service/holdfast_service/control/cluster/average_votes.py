"""What nodes say to each other of the averages of their ranks: which update is next, and whether all of theirs bring it.

Each node has one row of an attempt, which is never older than what it has done. Who has voted for an update keeps that row
until it has dealt with the update, so what any node reads leads to the same end (`daemon/averaging/agreement`).
"""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import insert

from holdfast_formats.staging.joint import AverageVote
from holdfast_service.control.cluster.bell import AVERAGES, CHANNEL
from holdfast_service.control.cluster.membership import Membership, now
from holdfast_service.control.database.schema import AverageVoteRow


class AverageVotes:
    """Every call is a few statements; `CatalogUnavailable` if the database does not answer. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database

    def cast(self, run: str, attempt: int, vote: AverageVote) -> list[AverageVote]:
        """Say what holds for the ranks of this node, perhaps again; returns what other nodes say, the newest word first."""
        me, row = self._membership.me.name, AverageVoteRow
        values = {**vote._asdict(), "ranks": list(vote.ranks), "changed": now()}
        made = insert(row).values({"run": run, "attempt": attempt, "node": me} | values)
        put = made.on_conflict_do_update(index_elements=[row.run, row.attempt, row.node], set_=values)
        wanted = select(row.ranks, row.number, row.history, row.folded).order_by(row.changed.desc())
        wanted = wanted.where(row.run == run, row.attempt == attempt, row.node != me)
        with self._database.plain() as connection:
            connection.execute(put)
            found = connection.execute(wanted).all()
        return [AverageVote(tuple(ranks), number, history, folded) for ranks, number, history, folded in found]

    def ring(self) -> None:
        """All nodes look at what the others say."""
        with self._database.plain() as connection:
            connection.execute(select(func.pg_notify(CHANNEL, AVERAGES)))

"""What nodes say to each other of their ranks of a launch, for what only all ranks together decide: where it stops, and that
saves lack ranks that wait for each other.

Each node has one row of a launch and topic, and says the same again as long as it holds. So the rows show what has held on
all nodes at the same time, by the database's clock alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.dialects.postgresql import insert

from holdfast_formats.staging.joint import RankReport, Topic
from holdfast_service.control.database.cluster_schema import NodeRow, RanksWordRow
from holdfast_service.wings.cluster.membership import Membership, now
from holdfast_service.wings.cluster.notify_listener import CHANNEL, RANKS

DECIDED = ""  # no node's name


class RankReports:
    """Every call is a few statements; `CatalogUnavailable` if the database does not answer. Thread-safe."""

    def __init__(self, membership: Membership) -> None:
        self._membership, self._database = membership, membership.database

    def report(self, run: str, attempt: int, topic: Topic, report: Mapping[str, Any]) -> list[RankReport]:
        """Say what holds for the ranks of this node, perhaps again; returns what all nodes have said, this one too."""
        row, key = RanksWordRow, {"run": run, "attempt": attempt, "topic": topic, "node": self._membership.me.name}
        values = {"boot": self._membership.me.boot, "said": dict(report), "since": now(), "until": now()}
        statement = insert(row).values(key | values)
        same = (row.boot == statement.excluded.boot) & (row.said == statement.excluded.said)
        put = statement.on_conflict_do_update(
            index_elements=[row.run, row.attempt, row.topic, row.node],
            set_={
                "boot": statement.excluded.boot,
                "said": statement.excluded.said,
                "since": case((same, row.since), else_=statement.excluded.since),
                "until": statement.excluded.until,
            },
        )
        with self._database.plain() as connection:
            connection.execute(put)
        return [word for word in self.reports(run, attempt, topic) if word.node != DECIDED]

    def reports(self, run: str, attempt: int, topic: Topic) -> list[RankReport]:
        """What nodes have said, and what was decided."""
        row, live = RanksWordRow, func.coalesce((NodeRow.boot == RanksWordRow.boot) & (NodeRow.until > now()), False)
        since, until = func.extract("epoch", row.since), func.extract("epoch", row.until)
        wanted = select(row.node, row.said, since, until, live).outerjoin(NodeRow, NodeRow.name == row.node)
        wanted = wanted.where(row.run == run, row.attempt == attempt, row.topic == topic).order_by(row.node)
        with self._database.plain() as connection:
            rows = connection.execute(wanted).all()
        return [
            RankReport(node, report, float(since), float(until), bool(live)) for node, report, since, until, live in rows
        ]

    def decide(self, run: str, attempt: int, topic: Topic, report: Mapping[str, Any]) -> Mapping[str, Any]:
        """The decision: this one, unless another node's came first. All nodes are notified."""
        row, key = RanksWordRow, {"run": run, "attempt": attempt, "topic": topic, "node": DECIDED}
        values = {"boot": "", "said": dict(report), "since": now(), "until": now()}
        stands = select(row.said).where(*(getattr(row, name) == value for name, value in key.items()))
        with self._database.plain() as connection:
            connection.execute(insert(row).values(key | values).on_conflict_do_nothing())
            decision: Mapping[str, Any] = connection.execute(stands).scalar_one()
        self.notify()
        return decision

    def decided(self, run: str, attempt: int, topic: Topic) -> Mapping[str, Any] | None:
        return next((word.said for word in self.reports(run, attempt, topic) if word.node == DECIDED), None)

    def stopping(self, runs: Collection[str]) -> list[tuple[str, int]]:
        """The launches of these runs that some node has marked to stop."""
        row = RanksWordRow
        wanted = select(row.run, row.attempt).where(row.topic == "stopping", row.run.in_(sorted(runs))).distinct()
        with self._database.plain() as connection:
            return [(run, int(attempt)) for run, attempt in connection.execute(wanted)]

    def notify(self) -> None:
        """Notify all nodes."""
        with self._database.plain() as connection:
            connection.execute(select(func.pg_notify(CHANNEL, RANKS)))

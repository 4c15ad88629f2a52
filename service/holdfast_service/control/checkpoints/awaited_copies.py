"""Answers whether a checkpoint was copied to a replica or tier, for what waits for that."""

from __future__ import annotations

from sqlalchemy import select

from holdfast_formats.errors import NoSuchCheckpoint, NoSuchResource, NoSuchRun, from_problem
from holdfast_formats.staging.messages import CopyAnswer
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.checkpoints.tiers import Tiers, has_copy
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow
from holdfast_service.control.database.visible import visible
from holdfast_service.control.nodes import Nodes


class AwaitedCopies:
    """Copies in the replicas and tiers of all nodes. Thread-safe."""

    def __init__(self, database: Database, tiers: Tiers, nodes: Nodes, record_queue: RecordQueue) -> None:
        self._database, self._tiers, self._nodes, self._record_queue = database, tiers, nodes, record_queue

    def of(self, run: str, step: int, name: str) -> CopyAnswer:
        """Whether a committed checkpoint is in a replica, read back there.

        Raises `NoSuchResource` for a replica that there is not, with those that there are; `NoSuchCheckpoint` if it was
        removed before it was copied; its damage; `CatalogUnavailable`.
        """
        self._check(name)
        if not visible(run):
            raise NoSuchRun(f"the run {run!r} does not exist", hint="`holdfast ls` lists the runs")
        with self._database.read() as session:
            row = session.get(CheckpointRow, (run, step))
            copy = session.get(ReplicaRow, (run, step, name))
            same = select(CheckpointRow.step).where(CheckpointRow.run == run, CheckpointRow.step == step)
            copied = session.scalar(same.where(has_copy(name, ("present",)))) is not None
        if row is None and copy is not None and copy.state == "present" and not copy.requested:
            return CopyAnswer(copied=True)  # the root's retention has removed it since
        if row is None and not self._record_queue.pending:
            raise NoSuchCheckpoint(
                f"{run}@{step} does not exist, and {name} has no copy of it",
                hint="if it was committed, it was removed before it was copied; see `holdfast events`",
            )
        if row is not None and row.damage is not None and not copied:
            raise from_problem(row.damage)
        problem = "" if copy is None or not copy.problem else f": {copy.problem.get('detail', 'unknown')}"
        why = "is not verified yet" if row is None or not row.verified else f"has yet to be copied to {name}{problem}"
        return CopyAnswer(copied=True) if copied else CopyAnswer(copied=False, why=f"{run}@{step} {why}")

    def _check(self, name: str) -> None:
        members = self._nodes.members()
        known = self._tiers.places.union(*(one.about.get("replicas", {}) for one in members))
        if name not in known:
            there = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise NoSuchResource(
                f"this root has no tier or replica {name!r}: {there}",
                hint="`holdfast serve --tier NAME=PLACE` adds one",
            )

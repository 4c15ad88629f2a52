"""The tiers to which a root drains, and what the root keeps because it has yet to be copied there."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import ColumnElement, select

from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow


class Tiers:
    """The tiers of a root by name, and what has yet to be copied to them. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.names: frozenset[str] = frozenset()
        self.places: frozenset[str] = frozenset()  # with the replicas of this node

    def add(self, name: str) -> None:
        self.names |= {name}
        self.places |= {name}

    def add_replica(self, name: str) -> None:
        """A place that is copied to, and for which the root keeps nothing."""
        self.places |= {name}

    def awaited(self, run: str) -> dict[int, str]:
        """The sound checkpoints of a run that have yet to be copied, with the reason to keep each."""
        found: dict[int, str] = {}
        for name in sorted(self.names):
            wanted = select(CheckpointRow.step).where(CheckpointRow.run == run, CheckpointRow.damage.is_(None))
            with self._database.read() as session:
                for step in session.scalars(wanted.where(~has_copy(name, ("present",)))):
                    found[step] = f"it has yet to be copied to the tier {name}"
        return found


def has_copy(name: str, states: Collection[str]) -> ColumnElement[bool]:
    """That a replica has a copy of the checkpoint in one of these states.

    A copy from before the commit is of another checkpoint, one of the same step that was lost with its disk. One of another
    size is of the checkpoint before it was thinned.
    """
    same = (ReplicaRow.tier == name, ReplicaRow.run == CheckpointRow.run, ReplicaRow.step == CheckpointRow.step)
    its = (ReplicaRow.since >= CheckpointRow.created, ReplicaRow.bytes == CheckpointRow.bytes)
    return select(ReplicaRow.run).where(*same, *its, ReplicaRow.state.in_(states)).exists()

"""The tiers to which a root drains, and what the root keeps because it is not known to be there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from sqlalchemy import ColumnElement, select

from holdfast_formats.errors import StateMismatch
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow

LEFT = StateMismatch.code  # why a checkpoint is not copied at all

# Looks at the copies of these steps of a run in one tier, for so many seconds; those that were not seen to stand, and why.
Look = Callable[[str, Collection[int], float], Mapping[int, str]]


class Tiers:
    """The tiers of a root by name, and what is not known to be there. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._looks: dict[str, Look] = {}
        self._unseen: dict[str, dict[int, str]] = {}  # by run, what the last look has not seen
        self.places: frozenset[str] = frozenset()  # with the replicas of this node

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._looks)

    def add(self, name: str, look: Look) -> None:
        """`look` looks at the copies in the tier itself."""
        self._looks = {**self._looks, name: look}
        self.places |= {name}

    def add_replica(self, name: str) -> None:
        """A place that is copied to, and for which the root keeps nothing."""
        self.places |= {name}

    def awaited(self, run: str) -> dict[int, str]:
        """The sound checkpoints of a run that have yet to be copied, or whose copies were not seen, with the reason to keep
        each. Not those that are never copied, since another root has left them behind.
        """
        found = dict(self._unseen.get(run, {}))
        for name in sorted(self.names):
            wanted = select(CheckpointRow.step).where(CheckpointRow.run == run, CheckpointRow.damage.is_(None))
            refused = select(ReplicaRow.step, ReplicaRow.problem).where(
                ReplicaRow.tier == name, ReplicaRow.run == run, ReplicaRow.state == "copying"
            )
            with self._database.read() as session:
                left = {step for step, problem in session.execute(refused) if (problem or {}).get("code") == LEFT}
                for step in session.scalars(wanted.where(~has_copy(name, ("present",)))):
                    if step not in left:
                        found[step] = f"it has yet to be copied to the tier {name}"
        return found

    def forget_looks(self, run: str) -> None:
        """Whatever was not seen is looked at again."""
        self._unseen.pop(run, None)

    def look(self, run: str, steps: Iterable[int], wait_s: float) -> Mapping[int, str]:
        """Look at the copies of these steps in all tiers: the catalog says what was true when a copy was made. Those that
        were not seen, with the reason to keep each, are `awaited` until the next look.
        """
        unseen: dict[int, str] = {}
        left = list(steps)
        for name, look in sorted(self._looks.items()):
            found = look(run, left, wait_s)
            unseen |= {step: f"its copy in the tier {name} {why}" for step, why in found.items()}
            left = [step for step in left if step not in found]
        self._unseen[run] = {**self._unseen.get(run, {}), **unseen}
        return unseen


def has_copy(name: str, states: Collection[str]) -> ColumnElement[bool]:
    """That a replica has a copy of the checkpoint in one of these states.

    A copy from before the commit is of another checkpoint, one of the same step that was lost with its disk. One of another
    size is of the checkpoint before it was thinned.
    """
    same = (ReplicaRow.tier == name, ReplicaRow.run == CheckpointRow.run, ReplicaRow.step == CheckpointRow.step)
    its = (ReplicaRow.since >= CheckpointRow.created, ReplicaRow.bytes == CheckpointRow.bytes)
    return select(ReplicaRow.run).where(*same, *its, ReplicaRow.state.in_(states)).exists()

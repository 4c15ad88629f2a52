"""Copies that something other than Holdfast has removed from a replica, or changed there."""

from __future__ import annotations

import logging
from collections.abc import Collection

from sqlalchemy import delete, select, update

from holdfast_formats.errors import CheckpointError
from holdfast_formats.naming import CheckpointId
from holdfast_formats.rest.operations import Level
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.checkpoints.tiers import has_copy
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow

log = logging.getLogger(__name__)

COUNTED = ("present", "damaged")  # states of a copy that is expected to be there
SHOWN_MAX = 10  # steps that a message names


class LostCopies:
    """The copies that are not where the catalog has them. Thread-safe."""

    def __init__(self, database: Database, events: Events) -> None:
        self._database, self._events = database, events

    def gone(self, name: str, run: str, steps: Collection[int]) -> None:
        """These copies are not there: those of checkpoints in the root are due again. One event tells it."""
        row = (ReplicaRow.tier == name, ReplicaRow.run == run, ReplicaRow.step.in_(steps), ReplicaRow.state.in_(COUNTED))
        with self._database.write() as session:
            missing = sorted(session.scalars(select(ReplicaRow.step).where(*row)))
            session.execute(delete(ReplicaRow).where(*row))
            here = (CheckpointRow.run == run, CheckpointRow.step.in_(missing), CheckpointRow.damage.is_(None))
            again = set(session.scalars(select(CheckpointRow.step).where(*here)))
        if missing:
            self._tell(name, run, missing, [step for step in missing if step not in again])

    def doubted(self, name: str, which: CheckpointId, error: CheckpointError) -> None:
        """A copy is damaged as far as a look shows: it does not count, and is read back, and repaired, soon."""
        row = (ReplicaRow.tier == name, ReplicaRow.run == which.run, ReplicaRow.step == which.step)
        with self._database.write() as session:
            found = session.scalar(select(ReplicaRow).where(*row, ReplicaRow.state.in_(COUNTED)))
            news = found is not None and found.state == "present"
            if found is not None:
                damaged = update(ReplicaRow).where(*row)
                session.execute(damaged.values(state="damaged", checked=None, problem=error.problem()))
        if news:
            text = f"step {which.step} in replica {name}: {error.detail}"
            self._events.add("replica-failed", text, *which, "error", tier=name, problem=error.problem())

    def was_made(self, name: str, which: CheckpointId) -> bool:
        """Whether a copy of the root's checkpoint was there, damaged by now or not: what is there is not another one."""
        wanted = select(CheckpointRow.step).where(CheckpointRow.run == which.run, CheckpointRow.step == which.step)
        with self._database.read() as session:
            return session.scalar(wanted.where(has_copy(name, COUNTED))) is not None

    def made_again(self, name: str, which: CheckpointId) -> None:
        """A copy that could not be repaired was replaced by another copy."""
        text = f"replica {name}: all files of step {which.step} were copied again, over a damaged copy"
        log.warning("%s: %s", which.run, text)
        self._events.add("checkpoint-repaired", text, *which, "warning", file="all files", source="primary", replica=name)

    def _tell(self, name: str, run: str, missing: Collection[int], lost: Collection[int]) -> None:
        text = f"copies in replica {name} are gone, removed by something other than Holdfast: {shown(missing)}"
        if len(lost) < len(missing):
            text += "; those of checkpoints in the root are made again"
        if lost:
            text += f"; the root does not have {shown(lost)} either"
        log.error("%s: %s", run, text)
        level: Level = "error" if lost else "warning"
        self._events.add("copies-gone", text, run, None, level, tier=name, copies=len(missing), lost=len(lost))


def shown(steps: Collection[int]) -> str:
    """These steps in a message, the newest first."""
    named = sorted(steps, reverse=True)[:SHOWN_MAX]
    more = f" and {len(steps) - len(named)} older ones" if len(steps) > len(named) else ""
    return f"step{'' if len(steps) == 1 else 's'} {', '.join(map(str, named))}{more}"

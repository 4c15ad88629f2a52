"""Lines of training in the catalog: what a save continues from and may replace, and what it abandons (`lineage`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from holdfast_formats import lineage
from holdfast_formats.errors import AlreadyCommitted
from holdfast_formats.lineage import Intent, Lineage, Rewind
from holdfast_service.control.database.schema import REWOUND, CheckpointRow


class ListedCheckpoint(NamedTuple):
    """A checkpoint that is listed, as far as its place among others goes."""

    step: int
    attempt: int
    turn: int
    rewinds: Sequence[Rewind]
    abandoned: bool = False
    groups: Sequence[str] = ()
    sound: bool = True
    healthy: bool | None = None


class SavePlace(NamedTuple):
    """Where a new checkpoint comes from, and whether it is put in the place of another one of its step."""

    lineage: Lineage
    over: bool


def place(
    there: Sequence[ListedCheckpoint], run: str, save: tuple[int, int], intent: Intent, anew: bool = False
) -> SavePlace:
    """The place of a save, of a step and an attempt, among the checkpoints that are there.

    `anew` says that its launch has begun the run anew, by a save before.

    Raises `AlreadyCommitted` for a step that is a checkpoint on the way to this save, unless that is damaged, unhealthy and
    of another turn, or to be replaced; and for a launch that has restored nothing and would go back behind what is there.
    """
    step, attempt = save
    launch = (attempt, intent.turn)
    rewinds = lineage.went_on(there, launch, intent.restored, intent.again)
    if (
        intent.restored is None
        and all(c.attempt != attempt for c in there)
        and (newer := lineage.others(there, launch, step, intent.again))
    ):
        if intent.existing != "replace" and not anew:
            raise AlreadyCommitted(
                f"{run} already has step {newer[-1]} of an earlier launch, but this launch has restored "
                f"nothing and saves step {step}",
                hint="call restore() first, or use another run; existing='replace' starts the run from scratch and "
                "abandons its checkpoints",
            )
        rewinds = (Rewind(attempt, intent.turn, lineage.NOTHING),)
    standing = next((c for c in there if c.step == step), None)
    found = SavePlace(Lineage(intent.restored, intent.turn, rewinds), standing is not None)
    if standing is None or not standing.sound or intent.existing == "replace" or not lineage.is_on(rewinds, standing):
        return found
    if standing.healthy is False and not lineage.is_own(standing, launch, intent.again):
        return found
    raise AlreadyCommitted(
        f"{run}@{step} is already committed",
        hint="pass existing='same' to count it as saved, or 'replace' to replace it, or remove it first",
        same=set(intent.groups) <= set(standing.groups),
        attempt=standing.attempt,
    )


def of(session: Session, run: str) -> list[ListedCheckpoint]:
    """What is listed of a run."""
    row = CheckpointRow
    columns = (row.step, row.attempt, row.turn, row.rewinds, row.abandoned, row.groups, row.damage.is_(None), row.healthy)
    return [
        ListedCheckpoint(step, attempt, turn, [Rewind(*rewind) for rewind in rewinds], *others)
        for step, attempt, turn, rewinds, *others in session.execute(select(*columns).where(row.run == run))
    ]


def settle(session: Session, run: str) -> None:
    """Mark what is abandoned, now that a checkpoint has come or gone; nothing is where nobody ever rewound."""
    session.flush()
    within = CheckpointRow.run == run
    marked = select(CheckpointRow.step).where(within, CheckpointRow.abandoned.is_(True)).limit(1)
    rewound = select(CheckpointRow.step).where(within, text(REWOUND)).limit(1)
    if session.scalar(rewound) is None and session.scalar(marked) is None:
        return
    there = of(session, run)
    left = lineage.abandoned(there)
    for found in there:
        if found.abandoned != (found.step in left):
            changed = update(CheckpointRow).where(within, CheckpointRow.step == found.step)
            session.execute(changed.values(abandoned=not found.abandoned))
    session.expire_all()

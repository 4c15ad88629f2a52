"""Lines of training in the catalog: what a save continues from and may replace, and what it abandons (`lineage`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from holdfast_formats import lineage
from holdfast_formats.errors import AlreadyCommitted
from holdfast_formats.lineage import NOWHERE, Elsewhere, Intent, Lineage, Rewind
from holdfast_service.control.database.schema import REWOUND, CheckpointRow


class ListedCheckpoint(NamedTuple):
    step: int
    attempt: int
    turn: int
    rewinds: Sequence[Rewind]
    abandoned: bool = False
    groups: Sequence[str] = ()
    sound: bool = True
    healthy: bool | None = None


class SavePlace(NamedTuple):
    """The parent of a new checkpoint, and whether it replaces another one of its step."""

    lineage: Lineage
    over: bool


def place(
    listed_checkpoints: Sequence[ListedCheckpoint],
    run: str,
    save: tuple[int, int],
    intent: Intent,
    elsewhere: Elsewhere = NOWHERE,
) -> SavePlace:
    """The place of a save, of a step and an attempt, among the checkpoints `listed_checkpoints`, and beside those of other
    roots.

    Raises `AlreadyCommitted` for a step that is a checkpoint on the way to this save, unless that is damaged, unhealthy and
    of another turn, or to be replaced; and for a launch that has restored none of the run's checkpoints, below it or above
    it.
    """
    step, attempt = save
    rewinds = lineage.went_on(listed_checkpoints, (attempt, intent.turn), intent.restored, intent.again, elsewhere)
    standing = next((c for c in listed_checkpoints if c.step == step), None)
    if (
        intent.restored is None
        and all(c.attempt != attempt for c in listed_checkpoints)
        and (newest := _not_continued(listed_checkpoints, standing, save, intent)) is not None
    ):
        if intent.existing != "replace" and not intent.again:
            raise _refusal(run, step, newest)
        if newest > step:  # what is below stays, for several trainings may be kept under one run, by their steps
            rewinds = (Rewind(attempt, intent.turn, lineage.NOTHING),)
    save_place = SavePlace(Lineage(intent.restored, intent.turn, rewinds), standing is not None)
    if standing is None or not standing.sound or intent.existing == "replace" or not lineage.is_on(rewinds, standing):
        return save_place
    if standing.healthy is False and not lineage.is_own(standing, (attempt, intent.turn), intent.again):
        return save_place
    raise AlreadyCommitted(
        f"{run}@{step} is already committed",
        hint="pass existing='same' to treat it as saved, existing='replace' to replace it, or remove it first",
        same=set(intent.groups) <= set(standing.groups),
        attempt=standing.attempt,
    )


def _not_continued(
    listed_checkpoints: Sequence[ListedCheckpoint], standing: ListedCheckpoint | None, save: tuple[int, int], intent: Intent
) -> int | None:
    """The newest step that a launch that has restored nothing would supersede, or go back behind.

    Nothing is superseded by a save of the newest step that is to count as saved, nor a damaged one by a save above it.
    """
    step, attempt = save
    unsound = {c.step for c in listed_checkpoints if not c.sound and c.step <= step}
    steps = [
        found
        for found in lineage.others(listed_checkpoints, (attempt, intent.turn), -1, intent.again)
        if found not in unsound
    ]
    counts = intent.existing == "same" and standing is not None and standing.healthy is not False
    return None if not steps or (counts and steps[-1] == step) else steps[-1]


def _refusal(run: str, step: int, newest: int) -> AlreadyCommitted:
    does = "starts the run from scratch and abandons its checkpoints" if newest > step else "saves it all the same"
    return AlreadyCommitted(
        f"{run} already has step {newest} of an earlier launch, but this launch has restored nothing and saves step {step}",
        hint="call restore() before the first save, or goes_on_from(step) if the state was loaded by other "
        f"means, or use another run; save({step}, existing='replace') {does}",
    )


def of(session: Session, run: str) -> list[ListedCheckpoint]:
    row = CheckpointRow
    columns = (row.step, row.attempt, row.turn, row.rewinds, row.abandoned, row.groups, row.damage.is_(None), row.healthy)
    return [
        ListedCheckpoint(step, attempt, turn, [Rewind(*rewind) for rewind in rewinds], *others)
        for step, attempt, turn, rewinds, *others in session.execute(select(*columns).where(row.run == run))
    ]


def settle(session: Session, run: str) -> None:
    """Update what is abandoned after a checkpoint was added or removed; nothing is in a run that never rewound."""
    session.flush()
    within = CheckpointRow.run == run
    marked = select(CheckpointRow.step).where(within, CheckpointRow.abandoned.is_(True)).limit(1)
    rewound = select(CheckpointRow.step).where(within, text(REWOUND)).limit(1)
    if session.scalar(rewound) is None and session.scalar(marked) is None:
        return
    steps = of(session, run)
    left = lineage.abandoned(steps)
    for placed in steps:
        if placed.abandoned != (placed.step in left):
            changed = update(CheckpointRow).where(within, CheckpointRow.step == placed.step)
            session.execute(changed.values(abandoned=not placed.abandoned))
    session.expire_all()

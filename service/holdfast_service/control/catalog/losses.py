"""Checkpoints that are gone and were not removed through Holdfast: recorded as events by the transaction that delists them.

Nothing else knows of them afterwards, and without a record the next launch would begin at zero in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from holdfast_service.control.catalog import events
from holdfast_service.control.database.schema import CheckpointRow, EventRow

KIND = "checkpoint-missing"
LEAVING = "removing"  # stamp of a checkpoint that Holdfast is about to remove; one that stands all the same is read again


class ListedStep(NamedTuple):
    stamp: str | None
    abandoned: bool


def listed(session: Session, run: str) -> dict[int, ListedStep]:
    """What is listed of a run, by step."""
    columns = select(CheckpointRow.step, CheckpointRow.stamp, CheckpointRow.abandoned).where(CheckpointRow.run == run)
    return {step: ListedStep(stamp, abandoned) for step, stamp, abandoned in session.execute(columns)}


def leaves(session: Session, run: str, step: int) -> None:
    """A checkpoint is about to be removed through Holdfast: nothing that finds it gone takes it for a loss."""
    leaving = update(CheckpointRow).where(CheckpointRow.run == run, CheckpointRow.step == step)
    session.execute(leaving.values(stamp=LEAVING))


def stays(session: Session, run: str, steps: Collection[int]) -> None:
    """These checkpoints were brought back, and can be lost again."""
    left = (CheckpointRow.run == run, CheckpointRow.step.in_(steps), CheckpointRow.stamp == LEAVING)
    session.execute(update(CheckpointRow).where(*left).values(stamp=None))


def lost(before: Mapping[int, ListedStep], gone: Collection[int], found: Collection[int], is_known: bool) -> list[int]:
    """Which of the steps that are `gone` were not removed through Holdfast, ascending. Where it is not known that the
    catalog has heard of every removal, it may be an old one: then only those that are newer than all that stand.
    """
    standing = {step for step, known in before.items() if not known.abandoned} - {*gone}
    newest = -1 if is_known else max(standing | {*found}, default=-1)
    missed = {step for step in gone if before[step].stamp != LEAVING and not before[step].abandoned}
    return sorted(step for step in missed - {*found} if step > newest)


def record(session: Session, run: str, steps: Collection[int], node: str, at: str) -> None:
    """Call it last in a transaction. `at`: RFC 3339."""
    for step in steps:
        events.append(
            session,
            EventRow(kind=KIND, text=text(step), run=run, step=step, level="error", node=node, at=at, detail={}),
        )


def text(step: int) -> str:
    return f"step {step} is gone: something other than Holdfast removed its directory"

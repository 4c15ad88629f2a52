"""The figures of runs, in the table `run_figures`: what pages need of a run is one row, whatever it has saved.

Triggers list runs that have changed (`database/changes`). The thread that writes the catalog renews their rows. A run that
is listed and not renewed yet is computed when it is read, so that no figure is ever older than what it is taken from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec
from sqlalchemy import delete, func, insert, select
from sqlalchemy.orm import Session

from holdfast_service.control.catalog.run_settings import COLUMNS, RunSettings
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import RunChangeRow, RunFiguresRow, RunRow
from holdfast_service.control.insight import summary_rows
from holdfast_service.control.insight.facts import CheckpointFacts, ReplicaCounts, Save, Warned

BATCH = 100  # runs at a time
CHANGES_MAX = 1000  # at a time
_RENEWING = 0x486F_6C64_4669_6775  # PostgreSQL's advisory lock: one node renews at a time


class StoredFigures(NamedTuple):
    """What is taken from the rows of a run."""

    held: CheckpointFacts = CheckpointFacts()
    saves: tuple[Save, ...] = ()
    declared: tuple[float, ...] = ()
    copies: Mapping[str, ReplicaCounts] = {}
    warned: tuple[Warned, ...] = ()


class RunRows(NamedTuple):
    """What the catalog says of one run."""

    attempt: int
    keep_last: int | None = None
    settings: RunSettings = RunSettings()
    figures: StoredFigures = StoredFigures()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredFigures).decode


def read(session: Session, runs: Collection[str] | None = None) -> dict[str, RunRows]:
    """Of those of these runs that exist, or of all."""
    changed = select(RunChangeRow.id).where(RunChangeRow.run == RunRow.name).exists()
    columns = select(RunRow.name, RunRow.attempt, RunRow.keep_last, RunFiguresRow.figures, changed, *COLUMNS)
    wanted = columns.outerjoin(RunFiguresRow, RunFiguresRow.run == RunRow.name)
    rows = session.execute(wanted if runs is None else wanted.where(RunRow.name.in_(runs))).all()
    stale = sorted(name for name, _, _, stored, is_changed, *_ in rows if stored is None or is_changed)
    computed: dict[str, StoredFigures] = {}
    for first in range(0, len(stale), BATCH):
        computed |= compute(session, stale[first : first + BATCH])
    return {
        name: RunRows(attempt, keep_last, RunSettings(*settings), computed[name] if name in computed else _decode(stored))
        for name, attempt, keep_last, stored, _, *settings in rows
    }


def compute(session: Session, runs: Collection[str]) -> dict[str, StoredFigures]:
    """The figures of these runs, from their rows."""
    held, saves = summary_rows.held(session, runs), summary_rows.saves(session, runs)
    declared, copies = summary_rows.declared(session, runs), summary_rows.copies(session, runs)
    warned = summary_rows.warned(session, runs)
    return {
        run: StoredFigures(
            held.get(run, CheckpointFacts()),
            tuple(saves.get(run, ())),
            tuple(declared.get(run, ())),
            copies.get(run, {}),
            tuple(warned.get(run, ())),
        )
        for run in runs
    }


def renew(database: Database) -> bool:
    """Renew the rows of some runs that have changed; whether others are left. `CatalogUnavailable`."""
    with database.read() as session:
        if session.scalar(select(RunChangeRow.id).limit(1)) is None:
            return False
    with database.write(hasty=True) as session:
        if database.is_shared and not session.scalar(select(func.pg_try_advisory_xact_lock(_RENEWING))):
            return False  # another node does
        changes = session.execute(
            select(RunChangeRow.id, RunChangeRow.run).order_by(RunChangeRow.id).limit(CHANGES_MAX)
        ).all()
        runs = sorted({run for _, run in changes})[:BATCH]
        there = session.scalars(select(RunRow.name).where(RunRow.name.in_(runs))).all()
        renewed = compute(session, there)  # after the changes were read: what is committed from here on is listed again
        session.execute(delete(RunFiguresRow).where(RunFiguresRow.run.in_(runs)))
        if renewed:
            rows = [{"run": run, "figures": _encode(figures)} for run, figures in renewed.items()]
            session.execute(insert(RunFiguresRow), rows)
        ids = [number for number, run in changes if run in set(runs)]
        session.execute(delete(RunChangeRow).where(RunChangeRow.id.in_(ids)))
        return len(ids) < len(changes) or len(changes) == CHANGES_MAX

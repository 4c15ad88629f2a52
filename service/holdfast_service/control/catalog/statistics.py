"""Statistics of checkpoints in the catalog: columns per tensor, and a summary by layer for plots.

The columns are deleted with their checkpoint. Summaries of the newest steps stay, so that a run with three
checkpoints still has a history.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.packing import natural_key
from holdfast_formats.errors import InvalidRequest, NoSuchResource
from holdfast_formats.rest import statistics
from holdfast_formats.rest.measurements import LayerHealth, Layers
from holdfast_formats.rest.statistics import Statistics
from holdfast_service.control.database.database import Database
from holdfast_service.control.database.schema import CheckpointRow, StatisticsRow

HISTORY_STEPS = 200  # of a run: summaries that may outlive their checkpoints
LAST_MAX = HISTORY_STEPS

_COMPARED = (CheckpointRow.healthy.is_(True), CheckpointRow.abandoned.is_(False))
NonFinite = dict[str, dict[str, list[int]]]  # group -> tensor -> [NaN, infinite]


class Baseline(NamedTuple):
    """The newest healthy checkpoint before another one: its step, and its elements that are not finite."""

    step: int
    nonfinite: NonFinite


class StatisticsStore:
    """The `statistics` table of one catalog. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._read, self._write = database.read, database.write

    def record(self, run: str, step: int, found: Statistics, summary: dict[str, Any], healthy: bool) -> None:
        """Store a checkpoint's statistics and verdict; does nothing for one that has been removed meanwhile."""
        at = (CheckpointRow.run == run, CheckpointRow.step == step)
        nonfinite = int(found.nonfinite.sum())
        with self._write() as session:
            if session.scalar(select(CheckpointRow.step).where(*at)) is None:
                return
            session.execute(update(CheckpointRow).where(*at).values(nonfinite=nonfinite, healthy=healthy))
            data = statistics.encode(found)
            session.merge(StatisticsRow(run=run, step=step, tensors=len(found), data=data, layers=summary))

    def lists(self, manifest: Manifest) -> bool:
        """Whether this very checkpoint is listed, neither removed nor replaced."""
        row = CheckpointRow
        columns = select(row.attempt, row.turn, row.created).where(row.run == manifest.run, row.step == manifest.step)
        with self._read() as session:
            stored = session.execute(columns).first()
        return stored is not None and tuple(stored) == (manifest.attempt, manifest.turn, manifest.created)

    def has(self, run: str, step: int) -> bool:
        """Whether a listed checkpoint has statistics."""
        at = (CheckpointRow.run == run, CheckpointRow.step == step, CheckpointRow.healthy.is_not(None))
        with self._read() as session:
            return session.scalar(select(CheckpointRow.step).where(*at)) is not None

    def load(self, run: str, step: int) -> Statistics:
        """The statistics of a checkpoint; `NoSuchResource` where there are none, `CorruptStatistics`."""
        columns = select(StatisticsRow.tensors, StatisticsRow.data)
        with self._read() as session:
            row = session.execute(columns.where(StatisticsRow.run == run, StatisticsRow.step == step)).first()
        if row is None or not row.data:
            raise NoSuchResource(
                f"there are no statistics of {run}@{step}",
                hint="they are computed when a checkpoint is verified after its commit",
            )
        return statistics.decode(row.data, row.tensors)

    def baseline(self, run: str, step: int) -> Baseline | None:
        """The newest healthy checkpoint of the run before this step; None when there is none."""
        joined = select(StatisticsRow.step, StatisticsRow.layers).join(
            CheckpointRow, (CheckpointRow.run == StatisticsRow.run) & (CheckpointRow.step == StatisticsRow.step)
        )
        wanted = joined.where(StatisticsRow.run == run, StatisticsRow.step < step, *_COMPARED)
        with self._read() as session:
            row = session.execute(wanted.order_by(StatisticsRow.step.desc()).limit(1)).first()
        return None if row is None else Baseline(row.step, row.layers.get("nonfinite", {}))

    def layers(self, run: str, group: str, last: int) -> Layers:
        """The newest `last` steps' health by layer, in order; empty for a run or group without statistics."""
        if not 1 <= last <= LAST_MAX:
            raise InvalidRequest(f"last must be from 1 to {LAST_MAX}, not {last}")
        wanted = select(StatisticsRow.step, StatisticsRow.layers).where(StatisticsRow.run == run)
        with self._read() as session:
            rows = session.execute(wanted.order_by(StatisticsRow.step.desc()).limit(last)).all()
        rows = list(reversed(rows))
        held = [row.layers.get("groups", {}).get(group, {}) for row in rows]
        names = sorted({name for cells in held for name in cells}, key=natural_key)
        steps = [row.step for row in rows]
        shown = {name: [_cell(s, cells.get(name)) for s, cells in zip(steps, held, strict=True)] for name in names}
        return Layers(run=run, group=group, steps=steps, layers=shown)


def forget_tensors(session: Session, run: str, step: int) -> None:
    """Drop the tensor statistics of a step that was replaced."""
    session.execute(update(StatisticsRow).where(StatisticsRow.run == run, StatisticsRow.step == step).values(data=b""))


def forget(session: Session, run: str, step: int) -> None:
    """Drop the tensor statistics of a removed checkpoint; the summary stays for a while."""
    forget_tensors(session, run, step)
    steps = select(StatisticsRow.step).where(StatisticsRow.run == run).order_by(StatisticsRow.step.desc())
    oldest = session.scalar(steps.offset(HISTORY_STEPS - 1).limit(1))
    listed = select(CheckpointRow.step).where(CheckpointRow.run == run)
    past = (StatisticsRow.run == run, StatisticsRow.step < (oldest or 0))
    session.execute(delete(StatisticsRow).where(*past, StatisticsRow.step.not_in(listed)))


def _cell(step: int, cell: list[Any] | None) -> LayerHealth | None:
    return None if cell is None else LayerHealth(step=step, nonfinite=cell[0], rms=cell[1], change=cell[2])

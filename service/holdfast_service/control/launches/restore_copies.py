"""What a restore may read from replicas: copies for what the root lacks of a checkpoint, which may be all of it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from sqlalchemy import select

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, Damaged, NoSuchCheckpoint
from holdfast_formats.staging.messages import CopyPlace
from holdfast_service.control.catalog.attempts import Attempts
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.database.schema import CheckpointRow, ReplicaRow
from holdfast_service.control.launches.lineage_index import LineageIndex
from holdfast_service.control.signals import Signal

log = logging.getLogger(__name__)

NOTED_MAX = 3  # copies that notes are about


class RestoreCopies:
    """The copies of one root's checkpoints, for restores. Thread-safe."""

    def __init__(self, catalog: Catalog, attempts: Attempts, lineage_index: LineageIndex, readers: Readers) -> None:
        self._catalog, self._attempts = catalog, attempts
        self._lineage_index, self._readers = lineage_index, readers
        self._places: dict[str, CopyPlace] = {}  # by replica
        # To be repaired, or without damage copied back, behind the restore that reads a copy.
        self.behind: Signal[[str, int, Damaged | None]] = Signal()
        self.suspected: Signal[[str, int, str, CheckpointError]] = Signal()  # a replica's copy, and what a rank met there

    def add(self, replica: str, place: CopyPlace) -> None:
        """A replica whose copies ranks may read, behind those added before."""
        self._places[replica] = place

    def of(self, run: str, step: int, *, damaged: bool = False) -> tuple[CopyPlace, ...]:
        """Where copies of the checkpoint are, without those known to be damaged, or these behind the others; none while the
        catalog is away. A copy from before the commit is of another checkpoint.
        """
        if not self._places:
            return ()
        same = (CheckpointRow.run == ReplicaRow.run, CheckpointRow.step == ReplicaRow.step)
        older = select(CheckpointRow.run).where(*same, CheckpointRow.created > ReplicaRow.since).exists()
        states = ("present", "damaged") if damaged else ("present",)
        row = (ReplicaRow.run == run, ReplicaRow.step == step, ReplicaRow.state.in_(states))
        try:
            with self._catalog.database.read() as session:
                rows = session.execute(select(ReplicaRow.tier, ReplicaRow.state).where(*row, ~older))
                state_of = {name: state for name, state in rows}
        except CatalogUnavailable:
            return ()
        having = (name for name in self._places if name in state_of)
        return tuple(self._places[name] for name in sorted(having, key=lambda name: state_of[name] == "damaged"))

    def readable(self, run: str, step: int, groups: Collection[str]) -> Manifest | None:
        """The checkpoint with these groups that a restore may read from a copy at once; None if there is none, or if only
        one of an attempt that this root does not know.
        """
        if not self.of(run, step):
            return None
        found = self._lineage_index.copy(run, step)
        if found is None or not set(groups) <= set(found.groups) or found.attempt > self._attempts.newest(run):
            return None
        return found

    def created(self, run: str, step: int) -> str:
        """When a checkpoint was saved that only replicas have, by which ranks know it from another one of its step."""
        copy = self._lineage_index.restored_copy(run, step)
        return "" if copy is None else copy.created

    def hold(self, copy: Manifest, who: str, seconds: float) -> bool:
        """Keep the copies for a restore; False if they are about to be removed, or were."""
        try:
            self._readers.hold(copy.run, copy.step, who, seconds)
        except NoSuchCheckpoint:
            return False
        if self.of(copy.run, copy.step):
            return True
        self._readers.release(copy.run, copy.step, who)
        return False

    def passed_over(self, run: str, step: int, problems: Mapping[str, CheckpointError]) -> None:
        """A rank met these problems, by the names of copies; "" is the root."""
        names = {place.name: replica for replica, place in self._places.items()}
        for name, problem in problems.items():
            if not name and isinstance(problem, Damaged):
                self.behind.publish(run, step, problem)
            elif name in names:
                self.suspected.publish(run, step, names[name], problem)

    def skipped(self, run: str, step: int | None) -> list[str]:
        """Notes on newer checkpoints that only replicas have, and that are not restored instead of this one."""
        if not self._places or step is None:
            return []
        row = (ReplicaRow.run == run, ReplicaRow.step > step, ReplicaRow.state.in_(("present", "damaged")))
        here = select(CheckpointRow.run).where(CheckpointRow.run == run, CheckpointRow.step == ReplicaRow.step).exists()
        wanted = select(ReplicaRow).where(*row, ~here).order_by(ReplicaRow.step.desc(), ReplicaRow.tier).limit(NOTED_MAX)
        try:
            with self._catalog.database.read() as session:
                rows = [(one.step, one.tier, one.state, one.problem) for one in session.scalars(wanted)]
        except CatalogUnavailable as away:
            return [f"whether replicas have newer checkpoints is not known: {away.detail}"]
        notes: dict[int, str] = {}
        for newer, replica, state, problem in rows:
            if newer in notes or replica not in self._places:
                continue
            why = self._why_not(run, newer, state, problem)
            if why is not None:
                notes[newer] = f"step {newer} in {self._places[replica].name} {why}: restored step {step} instead"
        return list(notes.values())

    def _why_not(self, run: str, step: int, state: str, problem: Mapping[str, object] | None) -> str | None:
        """Why a newer copy is not restored; None if training has left it."""
        if state == "damaged":
            return f"is damaged ({(problem or {}).get('detail', 'unknown')})"
        found = self._lineage_index.copy(run, step)
        if found is None:
            return "could not be read"
        return None if self._lineage_index.leaves(found) else "lacks groups that this restore needs"

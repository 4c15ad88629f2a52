"""What a tier keeps by itself of the copies of a root's checkpoints.

A replica loses a copy after its root has lost the checkpoint. A tier does so only where that was requested: what the root's
retention removes stays in the tier, which has a retention of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sqlalchemy import func, select, update

from holdfast_formats import lineage
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import Damaged, NoSuchCheckpoint
from holdfast_formats.files import Files
from holdfast_formats.rest import bodies
from holdfast_formats.rest.retention import RetentionPolicy
from holdfast_formats.timestamps import seconds_of
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.checkpoints import roots
from holdfast_service.control.checkpoints.lost_copies import LostCopies
from holdfast_service.control.checkpoints.readers import Readers
from holdfast_service.control.checkpoints.run_files import RunFile, RunFiles
from holdfast_service.control.database.schema import ReplicaRow
from holdfast_service.control.retention.policy import Candidate, decide
from holdfast_service.storage import Store


class TierRetention:
    """What one tier keeps of its copies: of each run the newest `keep`, None for all, and what is marked or in the root."""

    def __init__(
        self,
        name: str,
        keep: int | None,
        catalog: Catalog,
        files: RunFiles,
        lost: LostCopies,
        readers: Readers | None = None,
    ) -> None:
        """What the `readers` read stays: a launch may restore it from here."""
        self._name, self._keep, self._catalog, self._files, self._lost = name, keep, catalog, files, lost
        self._readers = readers or Readers()
        self._manifests: dict[tuple[str, int], Manifest] = {}

    def let_go(self, store: Store) -> None:
        """Mark the copies that no rule keeps for removal, by the same rules as those of a root. Only copies that are there
        count.
        """
        if self._keep is None:
            return
        row = (ReplicaRow.tier == self._name, ReplicaRow.state == "present")
        with self._catalog.database.read() as session:
            counted = select(ReplicaRow.run).where(*row).group_by(ReplicaRow.run).having(func.count() > self._keep)
            crowded = list(session.scalars(counted))
        for run in crowded:
            with self._catalog.database.read() as session:
                steps = set(session.scalars(select(ReplicaRow.step).where(*row, ReplicaRow.run == run)))
            if not self._superseded(store.files, run, steps):
                continue
            there = steps & store.stamps(run).keys()
            if there < steps:
                self._lost.gone(self._name, run, steps - there)
            gone = self._superseded(store.files, run, there)
            if gone:
                with self._catalog.database.write() as session:
                    session.execute(
                        update(ReplicaRow).where(*row, ReplicaRow.run == run, ReplicaRow.step.in_(gone)).values(state="gone")
                    )

    def _superseded(self, copies: Files, run: str, steps: Collection[int]) -> list[int]:
        here = {made.step: made for made in roots.all_checkpoints(self._catalog, run)}
        placed: dict[int, Manifest | bodies.CheckpointInfo] = {**self._read(copies, run, set(steps) - here.keys()), **here}
        left, file = lineage.abandoned(list(placed.values())), self._files.read(run)
        kept = dict.fromkeys(self._readers.held(run), "it is being read") | dict.fromkeys(here, "it is in the root")
        candidates = [_candidate(made, kept.get(step), step in left, file) for step, made in placed.items() if step in steps]
        newest = max((candidate.created for candidate in candidates), default=0.0)
        policy = RetentionPolicy(last=self._keep)
        return [decision.step for decision in decide(candidates, policy, newest) if not decision.keep]

    def _read(self, copies: Files, run: str, steps: Collection[int]) -> Mapping[int, Manifest]:
        """The manifests of copies without a checkpoint in the root; without those that cannot be read, which stay."""
        found = {}
        for step in steps:
            try:
                manifest = self._manifests.get((run, step)) or roots.load_manifest(copies, run, step)
            except (Damaged, NoSuchCheckpoint):
                continue
            found[step] = self._manifests[run, step] = manifest
        return found


def _candidate(made: Manifest | bodies.CheckpointInfo, kept: str | None, is_left: bool, file: RunFile) -> Candidate:
    pin = ["it is pinned"] if made.step in file.pins else []
    labels = [f"it has the label {label}" for label in file.labels_of(made.step)]
    gone = frozenset(made.thinned.groups) if made.thinned is not None else frozenset[str]()
    return Candidate(
        made.step,
        seconds_of(made.created),
        holds=(*pin, *labels, *([kept] if kept else [])),
        groups=frozenset(made.groups),
        line=lineage.line(made.rewinds),
        abandoned=is_left,
        gone=gone,
    )

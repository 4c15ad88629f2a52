"""Saves, from their first lease to their end: whether they may begin, their publication, and their records.

Nothing here waits for the catalog, except for a query or two with a deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Literal

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CheckpointError, GenerationDropped, StorageFailed
from holdfast_formats.lineage import NO_INTENT, Intent
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from holdfast_formats.rest.operations import Level
from holdfast_formats.staging.joint import JointlyStaged, ShareHandover
from holdfast_formats.staging.plan import WritePlan
from holdfast_service.control.checkpoints import commit, roots, shared_files
from holdfast_service.control.launches.restore_choice import RestoreSelector
from holdfast_service.control.launches.save_permits import SavePermits
from holdfast_service.control.parts import CheckpointParts
from holdfast_service.control.publishing import Publishing
from holdfast_service.control.recovery import Recovery
from holdfast_service.control.retention.admission import counted_bytes

log = logging.getLogger(__name__)


class SaveCoordinator:
    """The saves of one root. Thread-safe."""

    def __init__(
        self,
        parts: CheckpointParts,
        permits: SavePermits,
        publishing: Publishing,
        recovery: Recovery,
        restores: RestoreSelector,
    ) -> None:
        self._store, self._catalog, self._record_queue, self._events = (
            parts.store,
            parts.catalog,
            parts.record_queue,
            parts.events,
        )
        self._attempts, self._rounds, self._findings = parts.attempts, parts.rounds, parts.findings
        self._lineage_index, self._admission, self._published = parts.lineage_index, parts.admission, parts.published
        self._permits, self._publishing, self._recovery, self._restores = permits, publishing, recovery, restores

    def begin(
        self, run: str, step: int, attempt: int, world: int, intent: Intent = NO_INTENT, *, quiet: bool = False
    ) -> int:
        """Start the save of this step, or find it; `StaleAttempt` (I6) or `AlreadyCommitted` if it is not allowed. `quiet`:
        its lowest rank is on another node, which records how it goes on.
        """
        self._permits.check_new(run, step, attempt, intent)
        return self._rounds.open(run, step, attempt, world, quiet)

    def resume(self, run: str, step: int, attempt: int, world: int, intent: Intent | None = None) -> int:
        """Continue a save of an earlier daemon, or start it; refuses like `begin`, if the `intent` is known.

        A save that all ranks had sealed continues although a newer attempt waits for its end (I6).
        """
        self._permits.check_resumed(run, step, attempt, intent)
        return self._rounds.open(run, step, attempt, world)

    def commit(
        self,
        round_id: int,
        plan: WritePlan,
        measured: Mapping[str, float] | None = None,
        staged: JointlyStaged | None = None,
    ) -> Manifest:
        """Publish, then record, with what was `measured` so far; when this returns the checkpoint may be announced.

        `staged` is what several nodes have written together. The directory is the truth: a failure to record does not undo
        it; the next scan of the directories repairs that.
        """
        began = time.monotonic()
        try:
            self._attempts.keep_speakers(plan.run)
        except CheckpointError as error:  # their loss only lets a launch's name be used twice
            log.warning("cannot record which ranks of %s report for others: %s", plan.run, error.detail)
        if staged is None or commit.published_already(self._store, plan, staged) is None:
            need = counted_bytes(plan) - self._admission.shared_bytes(plan)
            self._admission.check_quotas(plan.run, plan.step, need)
        try:
            made = self._publishing.publish(plan, staged)
        except StorageFailed as error:
            if error.members.get("outcome") == "unknown":
                self._record_queue.enqueue("which checkpoints are in the directories", self._recovery.reconcile)
            raise
        known = {**(measured or {}), "commit_s": time.monotonic() - began, "bytes": float(made.bytes)}
        self._lineage_index.add(made)
        self._findings.made(made.run, made.step)
        self._committed(round_id, made, known, staged.place if staged else None)
        if plan.lacks_average:
            self._without_average(made)
        self._restores.parted(made.run, made.attempt)  # what all ranks have saved again, all of them have restored
        self._published.publish(made)
        return made

    def joined(self, round_id: int, run: str, step: int, attempt: int, measured: Mapping[str, float]) -> None:
        """Another node has committed a save in which ranks of this one took part."""
        self._findings.made(run, step)
        self._lineage_index.look_again(run, step)
        self._rounds.left(round_id, measured)
        self._restores.parted(run, attempt)

    def _committed(self, round_id: int, made: Manifest, measured: Mapping[str, float], staging: Place | None) -> None:
        """A checkpoint was published. `staging`: of a save of several nodes."""
        self._record_queue.enqueue(
            f"that the checkpoint {made.run}@{made.step} is committed", lambda: self.record(made, "linked_bytes" in measured)
        )
        self._rounds.end(round_id, "committed", measured=measured)
        self.clear(staging or Place(made.run, made.step, made.attempt))
        self._events.enqueue(
            "checkpoint-committed",
            f"step {made.step} is committed",
            made.run,
            made.step,
            bytes=made.bytes,
            measured=measured,
        )

    def _without_average(self, made: Manifest) -> None:
        """The ranks of this checkpoint keep an average that it lacks."""
        text = (
            f"step {made.step} was saved without the group ema: no update was in the average yet, or its parts on the ranks "
            "were not of the same updates, or differ where they must be equal; see the daemon's log"
        )
        self._events.enqueue("average-left-out", text, made.run, made.step, "warning")

    def written_for(self, made: Manifest, handover: ShareHandover) -> None:
        """A node could not write its share of this checkpoint; another one did."""
        why = handover.problem.get("detail", "it could not write")
        told = f"{why}; node {handover.helper} has written the share of node {handover.node} of step {made.step}"
        self._events.enqueue(
            "share-handed-over",
            told,
            made.run,
            made.step,
            "warning",
            unable=handover.node,
            helper=handover.helper,
            problem=dict(handover.problem),
        )

    def abort(
        self, round_id: int, error: CheckpointError, staging: Place | None, measured: Mapping[str, float] | None = None
    ) -> None:
        """End a save without a checkpoint and remove its staged files; leftovers are removed by the next sweep."""
        state: Literal["aborted", "dropped"] = "dropped" if isinstance(error, GenerationDropped) else "aborted"
        kind = "save-dropped" if state == "dropped" else "save-aborted"
        level: Level = "info" if state == "dropped" else "warning"

        detail, problem = error.detail, error.problem()  # the error's traceback would keep its frames alive

        def tell(run: str, step: int) -> None:
            self._events.enqueue(kind, f"step {step} was not saved: {detail}", run, step, level, problem=problem)

        self._rounds.end(round_id, state, error.code, error.detail, measured or {}, tell)
        if staging is not None and error.members.get("outcome") != "unknown":  # else it may be what a power cut brings back
            self.clear(staging)

    def record(self, made: Manifest, linked: bool = False) -> None:
        """Record a checkpoint in the catalog. `linked`: it has files of earlier ones."""
        stamp = roots.stamp(self._store, made.run, made.step)
        if stamp is not None or roots.stands(self._store.files, made.run, made.step):  # else removed meanwhile
            self._catalog.record_checkpoint(bodies.describe(made), stamp)
            shared_files.look(self._store, self._catalog.database, made.run, linked)

    def clear(self, place: Place) -> None:
        """Remove a staging place; the next sweep removes what cannot be removed now."""
        try:
            self._store.discard(place)
        except CheckpointError as failure:
            log.warning("%s stays until it is swept: %s", place.path, failure.detail)

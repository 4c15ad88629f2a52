"""Publishes a save as a checkpoint, replacing an existing one where that is allowed."""

from __future__ import annotations

import logging
import time

from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import AlreadyCommitted, Damaged, NoSuchResource, NotFound, RoundAborted
from holdfast_formats.rest import bodies
from holdfast_formats.staging.joint import JointlyStaged
from holdfast_formats.staging.plan import WritePlan
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.checkpoints import commit, replicas, roots, shared_files
from holdfast_service.control.checkpoints.commit import About
from holdfast_service.control.launches.restore_choice import RestoreSelector
from holdfast_service.control.parts import CheckpointParts

log = logging.getLogger(__name__)

LOOK_S = 2.0  # how long to wait for the catalog's newest attempt
AGAIN_S = 0.2


class Publishing:
    """Publishes written saves, by the present lines of training. Thread-safe."""

    def __init__(self, parts: CheckpointParts, restores: RestoreSelector) -> None:
        self._store, self._catalog, self._attempts = parts.store, parts.catalog, parts.attempts
        self._record_queue, self._lineage_index, self._rotation = parts.record_queue, parts.lineage_index, parts.rotation
        self._absences, self._nodes, self._restores = parts.absences, parts.nodes, restores

    def publish(self, plan: WritePlan, staged: JointlyStaged | None) -> Manifest:
        """Publish it, or find that another node has. Where storage contradicts this node's cached names, wait until they
        agree (I14).
        """
        try:
            return self._publish_as_seen(plan, staged)
        except (AlreadyCommitted, NoSuchResource, RoundAborted) as error:
            if self._nodes.alone or not self._appears(plan.run, plan.step, self._absences.patience_s):
                raise
            log.info("%s@%s is visible now and will be checked again: %s", plan.run, plan.step, error.detail)
            return self._publish_as_seen(plan, staged)

    def _appears(self, run: str, step: int, wait_s: float) -> bool:
        """Whether a checkpoint of this step exists, perhaps just published by another node."""
        limit = time.monotonic() + wait_s
        while not (roots.stands(self._store.files, run, step) and step in self._store.steps(run)):
            if time.monotonic() >= limit:
                return False
            time.sleep(AGAIN_S)
        return True

    def _publish_as_seen(self, plan: WritePlan, staged: JointlyStaged | None) -> Manifest:
        """Publish, replacing an existing one if that is allowed: as of now, not of when the round began."""
        self._attempts.refuse_overtaken(plan.run, plan.attempt, lambda question: self._record_queue.query(question, LOOK_S))
        if staged is not None:
            manifest = commit.published_already(self._store, plan, staged)
            if manifest is not None:
                return manifest
        lineage, over = self._lineage_index.place(plan.run, plan.step, plan.attempt, plan.intent)
        if staged is not None:
            lineage = self._nodes.settle(staged.place.round_id, lineage)
        about = About(lineage, over)
        if not over:
            return self._make_visible(plan, about, staged)
        self._restores.parted(plan.run, plan.attempt)  # all ranks have sealed since: what they restored they read no more
        try:
            with self._rotation.replacing(plan.run, plan.step):
                if not roots.stands(self._store.files, plan.run, plan.step):  # retention let it go in this very moment
                    about = About(lineage)
                return self._make_visible(plan, about, staged)
        finally:
            self._record_queue.enqueue(
                f"which checkpoint is at {plan.run}@{plan.step}", lambda: self._replaced(plan.run, plan.step)
            )

    def _make_visible(self, plan: WritePlan, about: About, staged: JointlyStaged | None) -> Manifest:
        if staged is not None:
            return commit.publish_joint(self._store, plan, staged, about)
        return commit.publish(self._store, plan, utc_now(), about=about)

    def _replaced(self, run: str, step: int) -> None:
        """Record the new checkpoint in the catalog: until then it is not judged by the entry of the old one."""
        try:
            checkpoint = bodies.describe(roots.load_manifest(self._store.files, run, step))
        except (Damaged, NotFound):  # removed or damaged at this moment: the next look finds that
            self._rotation.replaced.listed(run, step)
            return
        try:
            known = bodies.as_committed(self._catalog.checkpoint(run, step))
        except NotFound:
            known = None
        if known != bodies.as_committed(checkpoint):
            self._catalog.record_checkpoint(checkpoint, roots.stamp(self._store, run, step))
            shared_files.look(self._store, self._catalog.database, run, may_share=True)
            with self._catalog.database.write() as session:
                replicas.removed(session, run, step)
        self._rotation.replaced.listed(run, step)

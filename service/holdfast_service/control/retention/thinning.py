"""Thinning: which checkpoints are thinned to their weights or compacted, and how the result replaces the original.

All is decided under the lock of removals, and again at the moment of publishing, so a mark that was set holds (I4), and a
checkpoint that is being read is not thinned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from holdfast_formats import naming
from holdfast_formats.disk.compacting import OptimRule
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import CatalogUnavailable, CheckpointError, InUse, NotFound
from holdfast_formats.naming import Place
from holdfast_formats.rest import bodies
from holdfast_service.control.catalog.catalog import Catalog
from holdfast_service.control.catalog.events import Events
from holdfast_service.control.catalog.record_queue import RecordQueue
from holdfast_service.control.checkpoints import roots, shared_files
from holdfast_service.control.checkpoints.commit import publish_copy
from holdfast_service.control.retention.rotation import Rotation
from holdfast_service.control.retention.thin_policy import ThinDecision, decide_thinning
from holdfast_service.storage import Store

log = logging.getLogger(__name__)

# What is not the same of a checkpoint once it was thinned or compacted.
CHANGED = ("groups", "tensors", "files", "bytes", "thinned", "thin_bytes", "compacted", "small_bytes")


class Thinning:
    """The decisions about thinning in one root. Thread-safe."""

    def __init__(  # noqa: PLR0913 - each is one thing
        self,
        store: Store,
        catalog: Catalog,
        record_queue: RecordQueue,
        rotation: Rotation,
        events: Events,
        published: Callable[[Manifest], None],
        is_mine: Callable[[], bool] | None = None,
    ) -> None:
        """`published` gets the new checkpoint; `is_mine` returns whether this node, of several, thins."""
        self._store, self._catalog, self._record_queue = store, catalog, record_queue
        self._rotation, self._events = rotation, events
        self._published, self._is_mine = published, is_mine or (lambda: True)

    def due(self, run: str) -> list[ThinDecision]:
        """A run's next checkpoints to thin or compact, oldest first; none where another node does it."""
        decisions = sorted(one for one in self._decided(run).values() if one.acts)
        return decisions if decisions and self._is_mine() else []

    def publish(self, place: Place, encoded: bytes, commit: bytes, whole: bytes, small: OptimRule | None) -> Manifest:
        """Replace the checkpoint whose COMMIT is `whole` by what is staged and proven, atomically. `small`: it is complete,
        in fewer bytes by this rule.

        Raises `InUse` where that must not be done any more, and the errors of `commit.publish_copy`.
        """
        run, step = place.run, place.step
        with self._rotation.deciding(run):
            self._refuse(run, step, small)
            if self._store.files.read(f"{naming.checkpoint_path(run, step)}/{naming.COMMIT}") != whole:
                raise InUse(f"{run}@{step} was saved again in the meantime", hint="nothing was changed")
            with self._rotation.readers.removing(run, step) as free:
                if not free:
                    raise InUse(f"{run}@{step} is being read", hint="it will be thinned later")
                self._rotation.still_deciding()
                self._rotation.replaced.began(run, step)
                try:
                    manifest = publish_copy(self._store, place, encoded, commit, over=True)
                    self._take_back_if_late(run, step, commit)
                finally:  # whatever has come of it
                    self.was_done(run, step)
        self._published(manifest)
        self.clear(place)
        for before in self._store.replaced(run):  # what takes its place was read back before
            if before.step == step:
                self._let_go(before)
        return manifest

    def _take_back_if_late(self, run: str, step: int, commit: bytes) -> None:
        """Restore the original where this process was suspended just before: it may be in use by now."""
        try:
            self._rotation.still_deciding()
        except CatalogUnavailable:
            if self._store.files.read(f"{naming.checkpoint_path(run, step)}/{naming.COMMIT}") == commit:
                for before in self._store.replaced(run):
                    if before.step == step and (thinned := self._store.take_back(before)) is not None:
                        self._store.free(thinned)
            raise

    def was_done(self, run: str, step: int) -> None:
        """Record the new checkpoint in the catalog soon."""
        self._record_queue.enqueue(f"what remains of {run}@{step}", lambda: self.record(run, step))

    def clear(self, place: Place) -> None:
        """Remove a staging place; the next sweep removes what cannot be removed now."""
        try:
            self._store.discard(place)
        except CheckpointError as failure:
            log.warning("%s stays until it is swept: %s", place.path, failure.detail)

    def _let_go(self, place: Place) -> None:
        """Free what was replaced; the next look at replaced checkpoints does it if that fails."""
        try:
            if (gone := self._store.release(place)) is not None:
                self._store.free(gone)
        except CheckpointError as failure:
            log.warning("%s stays until it is released: %s", place.path, failure.detail)

    def waits(self, run: str, step: int, error: CheckpointError) -> None:
        """Tell that a checkpoint which is due stays as it is for now, why, and what to do."""
        problem = error.problem()  # the error's traceback would keep its frames alive
        text = "; ".join(filter(None, [f"step {step} will be thinned or compacted later: {error.detail}", error.hint]))
        record = partial(self._events.record, "thinning-failed", text, run, step, "warning", problem=problem)
        self._record_queue.enqueue(f"why {run}@{step} is not thinned or compacted yet", record)

    def _refuse(self, run: str, step: int, small: OptimRule | None) -> None:
        """Raise if a checkpoint that was due a moment ago is not due any more.

        Marks, readers, results about it, and enough newer whole ones may have changed since, and the rule itself: what
        `exact` keeps must not be replaced by an earlier `int8`.
        """
        checkpoint = self._catalog.checkpoint(run, step)
        self._rotation.guards.refuse_held(run, step)
        enough = (step, small) in {(one.step, one.small) for one in self.due(run)}
        done = checkpoint.thinned is not None or (small is not None and checkpoint.compacted is not None)
        if not enough or done:
            raise InUse(f"{run}@{step} no longer needs thinning", hint="nothing was changed")

    def _decided(self, run: str) -> dict[int, ThinDecision]:
        policy = self._rotation.files.read(run).in_force
        if policy.keep_full is None and policy.optim is None:
            return {}
        file, candidates = self._rotation.verdicts.looked_at(run)
        candidates, decisions = self._rotation.verdicts.proven(run, candidates, file.in_force)
        return decide_thinning(candidates, decisions, file.in_force)

    def record(self, run: str, step: int) -> bool:
        """Carry the checkpoint's results over to the rest of it: its bytes are those that were checked. Whether the catalog
        had to be changed.
        """
        is_recorded = False
        try:
            manifest = roots.load_manifest(self._store.files, run, step)
            stated = bodies.describe(manifest)
            known = self._catalog.checkpoint(run, step)
        except NotFound:
            self._rotation.replaced.listed(run, step)
            return False
        if (
            (manifest.thinned is not None or manifest.compacted is not None)
            and (known.thinned, known.compacted) != (stated.thinned, stated.compacted)
            and (known.attempt, known.created) == (stated.attempt, stated.created)
        ):
            now = {name: getattr(stated, name) for name in CHANGED}
            proven = self._rotation.probe.proof(run, step) if known.verified else None
            self._catalog.record_checkpoint(known.model_copy(update=now), roots.stamp(self._store, run, step), proven)
            shared_files.look(self._store, self._catalog.database, run)
            self._tell(manifest)
            is_recorded = True
        self._rotation.replaced.listed(run, step)
        return is_recorded

    def _tell(self, manifest: Manifest) -> None:
        if (small := manifest.compacted) is not None:
            freed, kind = (
                small.bytes - manifest.bytes,
                f"optimizer states as {small.optim}" if small.lossy else "bit for bit",
            )
            text = f"step {manifest.step} was compacted, {kind}: {freed} of {small.bytes} bytes were freed"
            about: dict[str, Any] = {"bytes": manifest.bytes, "freed": freed, "optim": small.optim, "error": small.error}
            self._events.add("checkpoint-compacted", text, manifest.run, manifest.step, **about)
            return
        assert manifest.thinned is not None
        freed, gone = manifest.thinned.bytes - manifest.bytes, ", ".join(manifest.thinned.groups)
        text = (
            f"step {manifest.step} was thinned to its weights: {freed} of {manifest.thinned.bytes} bytes are free ({gone})"
        )
        detail: dict[str, Any] = {"bytes": manifest.bytes, "freed": freed, "groups": list(manifest.thinned.groups)}
        self._events.add("checkpoint-thinned", text, manifest.run, manifest.step, **detail)

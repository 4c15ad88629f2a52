"""The worker that thins checkpoints to their weights, or stores them in fewer bytes: verifies what stays, stages it without
a copy, and has it published.

It runs at idle priority, and reads no faster than its pace. A crash leaves the whole checkpoint or the thin one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from holdfast_files.opened import CommittedManifest, open_checkpoint
from holdfast_formats import naming
from holdfast_formats.disk import manifests, thinning
from holdfast_formats.disk.compacting import OptimRule
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.disk.thinning import ThinCheckpoint
from holdfast_formats.errors import (
    CatalogUnavailable,
    CheckpointError,
    Conflict,
    Damaged,
    NoSpace,
    NotFound,
    StateMismatch,
    StorageFailed,
)
from holdfast_formats.naming import Place
from holdfast_formats.timestamps import utc_now
from holdfast_service.control.retention.thinning import Thinning
from holdfast_service.daemon.copying.compactor import stage_compact
from holdfast_service.daemon.copying.copies import CopyControl, CopyStopped, read_back
from holdfast_service.daemon.copying.hard_links import stage_again
from holdfast_service.daemon.copying.run_worker import RunWorker
from holdfast_service.storage import Store
from holdfast_service.storage.pacing import Pace

log = logging.getLogger(__name__)

AGAIN_S = 600.0  # retry interval after a lack of space or a conflict with a reader: neither is reported when it ends
FAILED_AGAIN_S = 3600.0  # where the storage failed: all that stays is read again each time


class Thinner:
    """Thins what is due of the runs passed to its `worker`."""

    def __init__(
        self,
        store: Store,
        records: Thinning,
        *,
        node: str = "",
        pace: Pace | None = None,
        suspect: Callable[[str, int, Damaged], None] = lambda run, step, error: None,
    ) -> None:
        """`suspect` is called with a damaged checkpoint, which was not thinned. `node` distinguishes nodes of a root."""
        self._store, self._records = store, records
        self._node, self._pace, self._suspect = node, pace, suspect
        self._refused: set[str] = set()  # what could not be done, of which manifest
        self._told: set[tuple[str, int]] = set()  # whose wait was logged
        self.worker = RunWorker("holdfast-thinner", self._look)

    def run_once(self, run: str) -> list[int]:
        """Thin and compact all of a run that is due now, oldest first; returns the steps. A failure does not stop the
        others.
        """
        done = []
        for due in self._records.due(run):
            if self.worker.is_closed:
                break
            if not self._still(run, due.step, due.small):
                continue
            try:
                if self._act(run, due.step, due.small):
                    done.append(due.step)
                self._told.discard((run, due.step))
            except Damaged as error:
                log.error("%s@%s is damaged and was not thinned: %s", run, due.step, error.detail)
                self._suspect(run, due.step, error)
            except CatalogUnavailable:
                raise
            except (NoSpace, StorageFailed) as error:  # others may need less, or free some, or lie on sound blocks
                self._waits(run, due.step, error)
            except (Conflict, NotFound) as error:  # a reader, a mark or a removal came first
                log.info("%s@%s stays as it is for now: %s", run, due.step, error.detail)
                self.worker.again(run, AGAIN_S)
        return done

    def _waits(self, run: str, step: int, error: CheckpointError) -> None:
        """Log once why a checkpoint stays as it is, and try it again later."""
        log.warning("%s@%s stays as it is for now: %s (%s)", run, step, error.detail, error.hint)
        if (run, step) not in self._told:
            self._told.add((run, step))
            self._records.waits(run, step, error)
        self.worker.again(run, AGAIN_S if isinstance(error, NoSpace) else FAILED_AGAIN_S)

    def _still(self, run: str, step: int, small: OptimRule | None) -> bool:
        """Whether it is still due in the same way: earlier ones may have taken hours, and the policy may have changed."""
        return any((one.step, one.small) == (step, small) for one in self._records.due(run))

    def _act(self, run: str, step: int, small: OptimRule | None) -> bool:
        """Thin one checkpoint, or store it in fewer bytes; returns whether that was done."""
        pair = open_checkpoint(self._store.files, naming.checkpoint_path(run, step))
        act = f"{self._node} {small or 'thin'} {manifests.stated_sha256(pair.commit)}"
        done = pair.manifest.thinned is not None or (small is not None and pair.manifest.compacted is not None)
        if done:  # by a node that was lost before the catalog heard of it, else it would not be due
            self._records.was_done(run, step)
            return False
        if act in self._refused:
            return False
        place = naming.job_place(run, step)
        try:
            manifest_small = self._staged(place, pair, small)
            encoded = manifests.encode(manifest_small)
            self._records.publish(place, encoded, manifests.encode_commit(manifest_small, encoded), pair.commit, small)
        except CheckpointError as error:
            if error.members.get("outcome") != "unknown":  # else a power cut may bring the whole one back from there
                self._records.clear(place)
            if not isinstance(error, StateMismatch):
                raise
            log.warning("%s@%s is not %s: %s", run, step, "compacted" if small else "thinned", error.detail)
            self._refused.add(act)
            return False
        except Exception:  # it was stopped, or this is a bug: what is staged takes room
            self._records.clear(place)
            raise
        kind = "thinned to its weights" if small is None else f"stored in fewer bytes ({small})"
        before = pair.manifest.bytes
        log.info("%s@%s was %s: %d of %d bytes were freed", run, step, kind, before - manifest_small.bytes, before)
        return True

    def _staged(self, place: Place, pair: CommittedManifest, small: OptimRule | None) -> Manifest:
        """Stage the checkpoint's replacement; its manifest."""
        going = CopyControl(self._pace, lambda: self.worker.is_closed)
        if small is not None:
            return stage_compact(self._store, place, pair, small, going)
        state = self._store.files.read(f"{naming.checkpoint_path(place.run, place.step)}/{naming.STATE}")
        thin = thinning.thin(pair.manifest, pair.encoded, state, utc_now())
        stage(self._store, place, thin, going)
        return thin.manifest

    def _look(self, run: str) -> None:
        try:
            self.run_once(run)
        except CopyStopped:  # what is staged is removed, or swept at the next start
            return
        except NotFound as error:
            log.info("thinning of %s: %s", run, error.detail)
        except CheckpointError as error:
            log.error("thinning of %s: %s", run, error.detail)
            self.worker.again(run, AGAIN_S)
        except Exception:
            log.exception("thinning of %s failed", run)


def stage(store: Store, place: Place, thin: ThinCheckpoint, going: CopyControl) -> None:
    """Stage the weights that stay of a checkpoint; raises what `stage_again` raises."""
    stage_again(store, place, thin.proof, going).put(naming.STATE, thin.state)
    state = tuple(entry for entry in thin.manifest.files if entry.name == naming.STATE)
    read_back(store.files, place.path, msgspec.structs.replace(thin.manifest, files=state, tensors={}, aliases={}), going)

"""Puts copies in their places in a replica, where another copy, or another node, may be."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress
from functools import partial

from holdfast_files.opened import CommittedManifest, open_checkpoint, read_commit
from holdfast_formats import lineage, naming
from holdfast_formats.disk import manifests, thinning, verification
from holdfast_formats.disk.manifests import Manifest
from holdfast_formats.errors import AlreadyCommitted, CheckpointError, Damaged, InUse, NotFound, StateMismatch, StorageFailed
from holdfast_formats.files import Files
from holdfast_formats.naming import CheckpointId, Place
from holdfast_service.control.checkpoints.replicas import ReplicaRecords
from holdfast_service.daemon.copying.copies import CopyControl, CopyStopped, carry, go_on, only, read_back
from holdfast_service.daemon.copying.hard_links import stage_again, unchanged
from holdfast_service.storage import RootStorage, StagedCheckpoint, Store


class CopyPublisher:
    """Stages, publishes and replaces the copies of one replica."""

    def __init__(
        self,
        name: str,
        source: Files,
        records: ReplicaRecords,
        is_mine: Callable[[], bool],
        going: Callable[[], CopyControl],
    ) -> None:
        """`name` is the replica's. Nothing is published when `is_mine` is false: another node copies there then. `going`
        paces a copy, and stops it.
        """
        self._name, self._source, self._records = name, source, records
        self._is_mine, self._going = is_mine, going
        self._begun: dict[CheckpointId, Place] = {}  # copies to go on with

    def find_begun(self, store: Store, wanted: Collection[CheckpointId]) -> list[Place]:
        """The places of copies that an earlier start has begun, of checkpoints that are still to be copied. This start goes
        on there.
        """
        self._begun.clear()
        for run in sorted({which.run for which in wanted}):
            for place in store.job_places(run):
                which = CheckpointId(run, place.step)
                if which in wanted and self._is_of(which, place):
                    self._begun[which] = place
        return list(self._begun.values())

    def _is_of(self, which: CheckpointId, place: Place) -> bool:
        try:
            commit = read_commit(self._source, naming.checkpoint_path(*which))
            return naming.is_copy_of(place, manifests.stated_sha256(commit))
        except CheckpointError:  # a copy of it begins where it can be read
            return False

    @property
    def has_begun(self) -> bool:
        """Whether there are copies to go on with."""
        return bool(self._begun)

    def keep_begun(self, store: Store, wanted: Collection[CheckpointId]) -> None:
        """Discard the others."""
        for which in [which for which in self._begun if which not in wanted]:
            store.discard(self._begun[which])
            del self._begun[which]

    def copy(self, replica: RootStorage, pair: CommittedManifest) -> None:
        """Copy a checkpoint of the source that the replica does not have. What a stop or a failing storage has interrupted
        stays, and is gone on with.
        """
        manifest, which = pair.manifest, CheckpointId(pair.manifest.run, pair.manifest.step)
        directory, sha256 = naming.checkpoint_path(*which), manifests.stated_sha256(pair.commit)
        place = self._begun.get(which)
        if place is None or not naming.is_copy_of(place, sha256):
            self.keep_begun(replica.store, self._begun.keys() - {which})
            place = self._begun[which] = naming.copy_place(*which, sha256)
        try:
            # In a bucket, to look costs requests for lists and manifests, at every copy of every run.
            there = {} if replica.tier is None else unchanged(replica.store, manifest)
            go_on(self._source, directory, replica.store.begin(place), manifest, self._going(), there)
            self._put(replica, place, pair)
        except (CopyStopped, StorageFailed):
            raise
        except BaseException:
            self._give_up(replica.store, place)
            del self._begun[which]
            raise
        del self._begun[which]

    def copy_again(self, replica: RootStorage, which: CheckpointId) -> Manifest | None:
        """Put a new copy in place of one that this root has made and that cannot be repaired, as where its files are gone;
        its manifest. None, and nothing is changed, if the source has no sound one, or there may be another checkpoint.
        """
        directory = naming.checkpoint_path(*which)
        try:
            pair = open_checkpoint(self._source, directory)
        except (Damaged, NotFound):
            return None
        try:
            if read_commit(replica.store.files, directory) != pair.commit:
                return None
        except Damaged as error:
            if "format" in error.members:  # a newer version has written it
                return None
        try:
            self.publish(replica, pair, partial(self._stage, pair.manifest), over=True)
        except (Damaged, InUse):  # the source itself, or what is sound of the copy is being read
            return None
        self.settle(replica.store, (which.run,))
        self._records.lost.made_again(self._name, which)
        return pair.manifest

    def _stage(self, manifest: Manifest, staged: StagedCheckpoint) -> None:
        carry(self._source, naming.checkpoint_path(manifest.run, manifest.step), staged, manifest, self._going())

    def publish(
        self, replica: RootStorage, pair: CommittedManifest, stage: Callable[[StagedCheckpoint], None], over: bool = False
    ) -> None:
        """Publish the files that `stage` stages, as this checkpoint; `over` in place of what is there."""
        place = Place(pair.manifest.run, pair.manifest.step, naming.NO_ATTEMPT)
        try:
            stage(replica.store.begin(place))
            self._put(replica, place, pair, over)
        except BaseException:
            self._give_up(replica.store, place)
            raise

    def _put(self, replica: RootStorage, place: Place, pair: CommittedManifest, over: bool = False) -> None:
        """`InUse` for one that would replace a copy that is being read: a restore reads it file by file."""
        self._check_mine()
        removing = self._records.readers.removing(place.run, place.step) if over else nullcontext(True)
        with removing as free:
            if not free:
                raise _in_use(place.run, place.step)
            self._records.publish(replica, place, pair.encoded, pair.commit, over)

    def _refuse_read(self, manifest: Manifest) -> None:
        """`InUse` before anything is staged that could not replace the copy yet."""
        if manifest.step in self._records.readers.held(manifest.run):
            raise _in_use(manifest.run, manifest.step)

    def _give_up(self, store: Store, place: Place) -> None:
        with suppress(CheckpointError):  # the next start sweeps what stays
            if self._is_mine():  # else it is the other node's
                store.discard(place)

    def follow(self, replica: RootStorage, pair: CommittedManifest) -> bool:
        """Thin or compact the copy as its checkpoint was: the latter replaces it, and only differences are copied. False if
        the copy stays, because no other checkpoint has what it would lose.
        """
        manifest, directory = pair.manifest, naming.checkpoint_path(pair.manifest.run, pair.manifest.step)
        whole = open_checkpoint(replica.store.files, directory).manifest
        if not self._records.may_follow(self._name, replica.store.files, manifest, whole):
            return False
        self._refuse_read(manifest)
        here, theirs = (verification.tensors_by_file(one) for one in (manifest, whole))
        names = {
            file.name for file in whole.files if file in manifest.files and here.get(file.name) == theirs.get(file.name)
        }
        proof, rest = only(whole, names), only(manifest, {file.name for file in manifest.files} - names)
        place = naming.job_place(manifest.run, manifest.step)
        going = self._going()
        try:
            staged = stage_again(replica.store, place, proof, going)
            carry(self._source, directory, staged, rest, going)
            self._put(replica, place, pair, over=True)
        finally:
            with suppress(CheckpointError):  # the next start sweeps what stays
                replica.store.discard(place)
        self.settle(replica.store, (manifest.run,))
        return True

    def settle(self, store: Store, runs: Iterable[str]) -> None:
        """Of a copy and the one that it replaced, keep the sound one; the newer one if both are."""
        for run in runs:
            for place in store.replaced(run):
                gone = store.take_back(place) if self._is_replaced_by_damage(store.files, place) else store.release(place)
                if gone is not None:
                    store.free(gone)

    def _check_mine(self) -> None:
        if not self._is_mine():
            raise StateMismatch(
                f"another node now copies to replica {self._name}", hint="nothing to do: that node continues"
            )

    def _is_replaced_by_damage(self, files: Files, place: Place) -> bool:
        """Whether the published copy is damaged, and the one that it replaced is sound; reads every byte."""
        for directory, stands in ((naming.checkpoint_path(place.run, place.step), False), (place.path, True)):
            try:
                read_back(files, directory, open_checkpoint(files, directory).manifest, self._going())
            except (Damaged, NotFound):
                continue
            return stands
        return False

    def settle_another(self, replica: RootStorage, pair: CommittedManifest) -> bool:
        """Where the published copy is sound, and another checkpoint: replace it if this one's line has left it behind, as
        saves do in the root, else raise `AlreadyCommitted`. Returns whether it is this one before thinning or compaction.
        """
        manifest = pair.manifest
        try:
            other = open_checkpoint(replica.store.files, naming.checkpoint_path(manifest.run, manifest.step))
        except Damaged:
            return False  # the repair shows what it is
        origins = [thinning.origin_sha256(one.manifest, manifests.stated_sha256(one.commit)) for one in (pair, other)]
        if origins[0] == origins[1] and thinning.lost(other.manifest) < thinning.lost(manifest):
            return True
        if other.encoded != pair.encoded and _has_left(manifest, other.manifest):
            self._refuse_read(manifest)
            self.publish(replica, pair, partial(self._stage, manifest), over=True)
            self.settle(replica.store, (manifest.run,))
        elif other.encoded != pair.encoded:
            self._records.others.found(self._name, manifest.run, [other.manifest])
            raise AlreadyCommitted(
                f"replica {self._name} has another checkpoint of {manifest.run}@{manifest.step}, which no longer exists "
                "in this root",
                hint="the replica's copy is kept: remove it if you do not need it, or train under another run name",
            )
        return False


def _in_use(run: str, step: int) -> InUse:
    return InUse(f"the copy of {run}@{step} is being read", hint="nothing to do: it is replaced afterwards")


def _has_left(manifest: Manifest, other: Manifest) -> bool:
    """Whether the line of a checkpoint began later than another one's, before it."""
    rewinds = manifest.rewinds
    return lineage.line(rewinds) > lineage.line(other.rewinds) and not lineage.is_on(tuple(rewinds), other)
